"""The study of contact: its closed forms, its twins, and what it shows."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from contadj.results import RecordFile
from contadj.studies import contact
from contadj.studies._run import StudyCells
from contadj.tableaus import get_tableau

BACKENDS = ("torch", "jax")
EPS = 1e-6


def drop(q, until=contact.T1):
    """(y, v) at a time, by SciPy's own event location and integrator."""
    y0, v0, e, g = q

    def floor(t, z):
        return z[0]

    floor.terminal, floor.direction = True, -1

    def fall(t, z):
        return [z[1], -g]

    first = solve_ivp(fall, (0, until), [y0, v0], events=floor, rtol=1e-12, atol=1e-13)
    start = [0.0, -e * first.y[1, -1]]
    return solve_ivp(fall, (first.t[-1], until), start, rtol=1e-12, atol=1e-13).y[:, -1]


PARAMETERS = np.array([contact.HEIGHT, contact.SPEED, contact.RESTITUTION, contact.GRAVITY])


def test_the_true_gradient_is_the_difference_quotient_of_a_ball_that_finds_its_impact():
    quotient = [
        (drop(PARAMETERS + unit)[0] - drop(PARAMETERS - unit)[0]) / (2 * EPS)
        for unit in EPS * np.eye(4)
    ]
    assert contact.rigid_gradient(contact.HEIGHT) == pytest.approx(quotient, rel=1e-6, abs=1e-7)
    assert contact.exact_value(contact.HEIGHT) == pytest.approx(drop(PARAMETERS)[0], rel=1e-10)


def test_the_limit_of_a_penalty_contact_is_the_difference_quotient_at_frozen_times():
    k, height = 400.0, contact.HEIGHT
    tau, w = contact.impact(height)
    zeta_of = lambda e: -np.log(e) / np.sqrt(np.pi**2 + np.log(e) ** 2)  # noqa: E731

    def fly(z, time, k, c, g):
        def field(t, z):
            return [z[1], -g - k * z[0] - c * z[1]]

        return solve_ivp(field, (0, time), z, rtol=1e-12, atol=1e-14, dense_output=True)

    def height_of(t):
        c = 2 * zeta_of(contact.RESTITUTION) * np.sqrt(k)
        return fly([0.0, -w], t, k, c, contact.GRAVITY).y[0, -1]

    # The time in contact, by bisection.
    low, high = 0.1, 0.3
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if height_of(middle) < 0 else (low, middle)

    def end(q):
        y0, v0, e, g = q
        before = fly([y0, v0], tau, 0.0, 0.0, g).y[:, -1]
        after = fly(before, low, k, 2 * zeta_of(e) * np.sqrt(k), g).y[:, -1]
        return fly(after, contact.T1 - tau - low, 0.0, 0.0, g).y[0, -1]

    q = np.array([height, *PARAMETERS[1:]])
    quotient = [(end(q + u) - end(q - u)) / (2e-5) for u in 1e-5 * np.eye(4)]
    assert contact.penalty_limit(height, k) == pytest.approx(quotient, rel=1e-6, abs=1e-7)


def test_the_limit_of_a_penalty_contact_tends_to_the_stiff_one_as_the_root_of_the_stiffness():
    stiff = contact.stiff_limit(contact.HEIGHT)
    far, near = (np.abs(contact.penalty_limit(contact.HEIGHT, k) - stiff) for k in (4.0**8, 4.0**9))
    assert far / near == pytest.approx(2, abs=0.05)
    off = stiff - contact.rigid_gradient(contact.HEIGHT)
    assert off[[0, 1, 3]] == pytest.approx(0, abs=1e-14) and off[2] < -0.04


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["euler", "midpoint"])
def test_a_step_that_finds_the_impact_has_the_derivative_of_what_it_computes(backend, method):
    tableau, height = get_tableau(method), contact.heights(32)[[3, 9]]
    _, gradient = contact.sweep(backend, "time_of_impact", tableau, 32, height, 0.0)
    ends = [
        contact.sweep(backend, "time_of_impact", tableau, 32, height + eps, 0.0)[0]
        for eps in (-EPS, EPS)
    ]
    assert gradient[:, 0] == pytest.approx((ends[1] - ends[0]) / (2 * EPS), rel=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_finding_the_impact_with_midpoint_gives_the_true_gradient_at_every_step_size(backend):
    height = contact.heights(32)
    value, gradient = contact.sweep(
        backend, "time_of_impact", get_tableau("midpoint"), 32, height, 0.0
    )
    true = np.array([contact.rigid_gradient(one) for one in height])
    assert np.abs(value - contact.exact_value(height)).max() < 1e-13
    assert np.abs(gradient - true).max() < 1e-13


@pytest.mark.parametrize(
    ("name", "k"),
    [(name, 0.0) for name in (*contact.RULES, "time_of_impact")] + [("penalty", 1024.0)],
)
def test_both_backends_give_the_same_value_and_gradient(name, k):
    ours, theirs = (
        contact.sweep(one, name, get_tableau("midpoint"), 64, contact.heights(64), k)
        for one in BACKENDS
    )
    for one, other in zip(ours, theirs, strict=True):
        assert np.abs(one - other).max() < 1e-13 * np.abs(one).max()


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    settings = contact.Settings(
        study="contact",
        backends=("jax",),
        methods=("midpoint",),
        steps=(128, 256),
        stiffness=(1024.0, 4096.0),
        penalty_steps=(1024, 4096, 16384),
    )
    with RecordFile(tmp_path_factory.mktemp("contact") / "records.jsonl") as file:
        return StudyCells("contact", settings).run(file)


@pytest.mark.parametrize("rule", contact.RULES)
def test_an_impact_rule_gives_the_right_place_and_the_derived_wrong_gradient(records, rule):
    ones = contact.series(records)["jax", rule, "midpoint", 0.0]
    value, true, limit = ([one[name] for one in ones] for name in ("value", "true", "limit"))
    assert value[-2] / value[-1] == pytest.approx(2, rel=0.1)
    assert limit[-2] / limit[-1] == pytest.approx(2, rel=0.1)
    assert min(true) > 0.1 and true[-2] / true[-1] == pytest.approx(1, rel=0.1)
    assert max(ones[-1]["restitution"], ones[-1]["limit"]) < 0.01


def test_a_penalty_contact_needs_h_k_small_and_not_only_h_root_k(records):
    found = contact.series(records)
    soft, stiff = (found["jax", "penalty", "midpoint", k] for k in (1024.0, 4096.0))
    # Resolved, h sqrt(k) = 1/32 and 1/64, but h k = 1: one interval of gradients for any h.
    assert soft[0]["spread"] > 0.05
    assert stiff[1]["spread"] == pytest.approx(soft[0]["spread"], rel=0.25)
    # h k -> 0: the gradient tends to the limit derived, which the stiffness keeps from the truth.
    assert soft[2]["limit"] < 0.01 < 0.2 < soft[2]["true"]
    assert soft[2]["distance"] == pytest.approx(2 * stiff[2]["distance"], rel=0.15)
    lines = contact.findings(records)
    assert any(line.startswith("jax penalty midpoint, k = 1024") for line in lines)
