"""Order conditions of the multistep methods, by running the formula on polynomials."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from contadj.multistep import METHODS, MULTISTEP, Multistep

ALL = list(MULTISTEP)


def defect(method, degree, h=Fraction(1, 3), t=Fraction(2, 5)):
    """What the formula leaves of y = s^degree, in exact arithmetic."""
    y = lambda s: s**degree  # noqa: E731
    dy = lambda s: degree * s ** max(degree - 1, 0)  # noqa: E731
    right = sum(a * y(t - j * h) for j, a in enumerate(method.values))
    right += h * sum(b * dy(t - j * h) for j, b in enumerate(method.slopes))
    return y(t + h) - right - h * method.next_slope * dy(t + h)


@pytest.mark.parametrize("name", ALL)
def test_a_formula_is_exact_for_polynomials_up_to_its_order_and_no_further(name):
    method = MULTISTEP[name]
    assert [defect(method, degree) for degree in range(method.order + 1)] == [0] * (
        method.order + 1
    )
    assert defect(method, method.order + 1) != 0


# Hairer, Norsett & Wanner, Solving Ordinary Differential Equations I, III.2: the
# constant c of the local error c h^(p+1) y^(p+1).
ERROR_CONSTANTS = {
    "ab2": "5/12", "ab3": "3/8", "ab4": "251/720", "am3": "-1/24", "am4": "-19/720",
    "bdf2": "-2/9", "bdf3": "-3/22", "leapfrog": "1/3",
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_the_error_constant_is_that_of_the_literature(name):
    p = MULTISTEP[name].order
    factorial = np.prod(range(1, p + 2))
    assert defect(MULTISTEP[name], p + 1, h=Fraction(1)) / int(factorial) == Fraction(
        ERROR_CONSTANTS[name]
    )


@pytest.mark.parametrize(
    ("name", "slope_sum"),
    [("ab2", 1), ("ab3", 1), ("ab4", 1), ("am3", 1), ("am4", 1), ("leapfrog", 2),
     ("bdf2", Fraction(2, 3)), ("bdf3", Fraction(6, 11))],
)  # fmt: skip
def test_the_slope_sum_is_that_of_the_family(name, slope_sum):
    assert MULTISTEP[name].slope_sum == slope_sum


def test_only_leapfrog_has_a_parasitic_root_on_the_unit_circle():
    def parasitic(name):
        roots = MULTISTEP[name].roots
        return np.abs(np.delete(roots, np.argmin(np.abs(roots - 1)))).max(initial=0.0)

    assert {name for name in ALL if parasitic(name) > 0.99} == {"leapfrog"}
    assert parasitic("bdf2") == pytest.approx(1 / 3)
    assert parasitic("bdf3") == pytest.approx((2 / 11) ** 0.5)


def test_reversible_heun_is_the_one_method_with_a_history_that_is_no_multistep_method():
    assert set(METHODS) - set(MULTISTEP) == {"reversible_heun"}


def test_a_wrong_order_is_refused():
    with pytest.raises(ValueError, match=r"'ab3': `order` must be 3, .* got 4"):
        replace(MULTISTEP["ab3"], order=4)


def test_a_wrong_coefficient_is_refused():
    with pytest.raises(ValueError, match=r"`order` must be 0"):
        replace(MULTISTEP["ab2"], slopes=(Fraction(3, 2), Fraction(1, 2)))


@pytest.mark.parametrize(
    ("values", "slopes", "order"),
    # Dahlquist's example, order 3 with the root -5; and a double root 1.
    [("-4 5", "4 2", 3), ("2 -1", "1 -1", 2)],
    ids=["root outside", "double root"],
)
def test_a_method_that_is_not_zero_stable_is_refused(values, slopes, order):
    values, slopes = (tuple(map(Fraction, text.split())) for text in (values, slopes))
    with pytest.raises(ValueError, match="not zero-stable"):
        Multistep("unstable", values, slopes, Fraction(0), order, "")
