"""Delete every key of the store at port 29500, on the machine of the first argument."""

import sys
from datetime import timedelta

from torch.distributed import TCPStore

wait = {"wait_for_workers": False, "timeout": timedelta(seconds=20)}
store = TCPStore(sys.argv[1], 29500, is_master=False, **wait)
keys = store.list_keys()
print(len(keys), sum(map(store.delete_key, keys)), flush=True)
