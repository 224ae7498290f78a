"""What a plan's number formats cost in accuracy: errors by layer, outputs, losses."""

from fxtrain.quality.comparing import compare
from fxtrain.quality.pictures import plot
from fxtrain.quality.records import Case, Compared, Comparison, LayerError
from fxtrain.quality.tables import table

__all__ = ["Case", "Compared", "Comparison", "LayerError", "compare", "plot", "table"]
