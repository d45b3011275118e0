"""Gradients of ODE solves: discrete, continuous, and how one approaches the other.

The backends are `contadj.torch` and `contadj.jax`; importing `contadj` loads neither framework.
"""

from .problems import Gradient, GradientProblem
from .tableaus import TABLEAUS, Tableau, get_tableau

__version__ = "0.1.0"
__all__ = ["TABLEAUS", "Gradient", "GradientProblem", "Tableau", "__version__", "get_tableau"]
