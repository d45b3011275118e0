"""The continuous gradient with theta-bar by Gauss quadrature."""

from __future__ import annotations

from ._continuous import Backward
from ._interpolating import InterpolatingAdjoint


class GaussAdjoint(InterpolatingAdjoint):
    """The continuous gradient with lambda alone in the backward solve.

        lambda' = -f_y(t, y(t))^T lambda,   theta-bar = int f_theta(t, y(t))^T lambda dt,

    the integral taken on each backward step by Gauss-Legendre quadrature with enough nodes for the
    order of the method, lambda from the dense output of that step. The parameters enter neither
    the state of the backward solve nor its stages nor its error control: cheapest where they are
    many. Dense output of lower order than the method lowers the order of theta-bar to its own.

    Parameters
    ----------
    method, rtol, atol, max_steps
        As in `BacksolveAdjoint`.
    seminorm : bool
        No effect: theta-bar is never part of the error control.

    References
    ----------
    Norcliffe & Deisenroth (2023), arXiv:2308.10644.
    """

    def nodes(self, backward: Backward):
        order = backward.solver.order(None) or 4
        return (order + 1) // 2
