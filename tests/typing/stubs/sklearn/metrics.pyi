# The function of scikit-learn that examples use; the package has no types.
from typing import Literal

from torch import Tensor

def f1_score(y_true: Tensor, y_pred: Tensor, *, average: Literal["macro"]) -> float: ...
