"""The continuous adjoint with the theta-gradient by Gauss quadrature."""

from __future__ import annotations

from dataclasses import dataclass

from ...tableaus import get_tableau
from ._base import Integration
from ._interpolating import InterpolatingAdjoint


@dataclass(frozen=True)
class GaussAdjoint(InterpolatingAdjoint):
    """The continuous gradient with lambda alone in the reverse solve.

        lambda' = -f_y(t, y(t))^T lambda - g c_y,
        theta_bar = int (f_theta^T lambda + g c_theta) dt.

    The integral is taken on each reverse step by Gauss-Legendre quadrature with enough nodes for
    the order of the method, y from the forward solution and lambda from the dense output of its
    own step. Parameters enter neither the ODE state nor its stages: cheapest where they are many.

    Parameters
    ----------
    method, rtol, atol, options
        As in `BacksolveAdjoint`.
    seminorm : bool
        No effect: theta_bar is never part of the error norm.

    References
    ----------
    Norcliffe & Deisenroth 2023, Faster training of neural ODEs using Gauss-Legendre quadrature,
    arXiv:2308.10644.
    """

    def quadrature_nodes(self, integration: Integration) -> int:
        """Gauss nodes per step: m nodes integrate to order 2 m."""
        tableau = integration.method.tableau
        if self.method is not None:
            tableau = get_tableau(self.method)
        return (tableau.order + 1) // 2
