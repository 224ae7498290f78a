"""The accuracy that low precision costs: errors by layer, of outputs and of losses."""

from fxtrain.quality.comparing import compare
from fxtrain.quality.records import Case, Compared, Comparison, LayerError
from fxtrain.quality.showing import plot, table

__all__ = ["Case", "Compared", "Comparison", "LayerError", "compare", "plot", "table"]
