"""Laws of strategies by name."""

from fxtrain.testing import LAWS, all_at_once
from tests.cluster._models import synced_each

LAW = {law.__name__: law for law in (*LAWS, all_at_once, synced_each)}
