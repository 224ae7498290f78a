"""The accuracy that low precision costs: errors by layer, of outputs and of losses."""

from fxtrain.quality.comparing import Case, Compared, Comparison, LayerError, compare
from fxtrain.quality.showing import plot, table

__all__ = ["Case", "Compared", "Comparison", "LayerError", "compare", "plot", "table"]
