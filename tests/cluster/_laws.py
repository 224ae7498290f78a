"""Laws of strategies by name."""

from fxtrain.testing import LAWS, all_at_once
from tests.cluster._models import synced_each

# Which `all_at_once` holds together.
TOGETHER = (
    "same_as_one_process",
    "same_in_micro_batches",
    "same_by_tokens",
    "same_clipped",
    "whole_weights_change_nothing",
)
# Those that take longest, which are quick of one process and of DDP.
LONG = (
    "every_function_is_used",
    "overflow_skips_everywhere",
    "parts_are_the_step",
    "resumes_where_it_stopped",
    "same_by_tokens",
    "same_in_micro_batches",
    "whole_weights_change_nothing",
)
LAW = {law.__name__: law for law in (*LAWS, all_at_once, synced_each)}
