"""Problems whose gradient is known: constants, closed forms, references and data."""

from ._builtin import BUILT_IN, problem_data
from ._problem import Gradient, GradientProblem, ProblemData

__all__ = ["BUILT_IN", "Gradient", "GradientProblem", "ProblemData", "problem_data"]
