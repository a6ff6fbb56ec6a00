"""Curvature of a task's loss: as checkpoints that merging can read, and as numbers.

```python
from mergekit_lab.curvature import Hessian, diagonal_fisher, input_grams, top_eigenvalues, trace
```
"""

from mergekit_lab.curvature.chained_grams import chained_grams
from mergekit_lab.curvature.fisher import diagonal_fisher
from mergekit_lab.curvature.gram import input_grams
from mergekit_lab.curvature.hessian import Hessian, top_eigenvalues, trace
from mergekit_lab.curvature.moments import first_moment, squared_first_moment

__all__ = [
    "Hessian",
    "chained_grams",
    "diagonal_fisher",
    "first_moment",
    "input_grams",
    "squared_first_moment",
    "top_eigenvalues",
    "trace",
]
