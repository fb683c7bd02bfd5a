"""The demo, cut short: its numbers, what it says of them, and its picture. About 20 s."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

import hookean as hk
from hookean import demo

CHAINS, NUM_STEPS, THIN = 3, 320, 10
SIZES = {"num_steps": NUM_STEPS, "thin": THIN, "width": 8, "progress": False}


@pytest.fixture(scope="module")
def result() -> demo.Comparison:
    return demo.compare(seed=1, chains=CHAINS, **SIZES)


# -- the runs ----------------------------------------------------------------------------------------------------------


def test_predictions_are_probabilities_of_trained_networks(result: demo.Comparison) -> None:
    assert [len(scheme.log_probabilities) for scheme in result.schemes.values()] == [1, CHAINS, CHAINS]
    for scheme in result.schemes.values():
        each = scheme.log_probabilities
        assert each.shape[1:] == (NUM_STEPS // THIN, len(result.digits), 10)
        assert np.all(np.isfinite(each))
        np.testing.assert_allclose(np.exp(each).sum(-1), 1, rtol=1e-5)
        last = demo.predictions(scheme, result, NUM_STEPS // THIN - 1)["average"]
        value, right, error = demo.scores(last, result.digits)
        assert value > 0.7 * np.log(1 / 10), "not much better than guessing"
        assert right > 0.5
        assert 0 <= error <= 1
        first = demo.predictions(scheme, result, 0)
        assert value > demo.scores(first["state"], result.digits)[0], "nothing was learnt"
        assert "average" not in first


def test_a_mean_of_predictions_is_at_least_as_good_as_its_members_are_on_average(result: demo.Comparison) -> None:
    """Jensen: the logarithm of a mean is at least the mean of logarithms, for each digit."""
    for scheme in result.schemes.values():
        for at in range(len(result.steps)):
            found = demo.predictions(scheme, result, at)
            together = demo.log_likelihoods(found["states"], result.digits)[0]
            apart = demo.log_likelihoods(found["state"], result.digits).mean(0)
            assert np.all(together >= apart - 1e-9)
        average = demo.log_likelihoods(found["average"], result.digits)[0]
        each = demo.log_likelihoods(scheme.log_probabilities[:, result.kept], result.digits)
        assert np.all(average >= each.mean((0, 1)) - 1e-9)


def test_averages_take_only_draws_that_no_spring_acts_on(result: demo.Comparison) -> None:
    assert result.steps[0] <= NUM_STEPS / 8, "no curve from the start"
    assert result.pull[0] == 1
    assert np.all(result.pull[result.kept] == 0)
    np.testing.assert_array_equal(result.steps[result.kept], np.arange(NUM_STEPS // 2 + THIN, NUM_STEPS + 1, THIN))


def test_the_one_chain_is_the_first_of_the_independent_ones(result: demo.Comparison) -> None:
    """Also where it is run on its own: the chains beside it make no difference, up to the order of sums."""
    one, independent, elastic = (scheme.log_probabilities for scheme in result.schemes.values())
    np.testing.assert_array_equal(one, independent[:1])
    assert not np.array_equal(independent, elastic)
    target, (test, _) = demo.digits_target()
    settings = {**SIZES, "num_steps": 40}
    alone = demo.sample(target, hk.Independent(), chains=1, seed=1, **settings)
    for draw, wanted in enumerate(one[0, : 40 // THIN]):
        weights = {name: leaf[0, draw] for name, leaf in alone.draws.items()}
        np.testing.assert_allclose(demo._log_probabilities(weights, test), wanted, rtol=1e-3, atol=1e-3)


# -- scores ------------------------------------------------------------------------------------------------------------


def test_calibration_error_in_closed_form() -> None:
    """Half the digits at confidence 0.95, of which 3/4 are right; half at 0.55, of which all are right."""

    def sure_of_zero(confidence: float) -> np.ndarray:
        return np.log([confidence, *[(1 - confidence) / 9] * 9])

    predicted = np.stack([sure_of_zero(0.95)] * 4 + [sure_of_zero(0.55)] * 4)
    digits = np.array([0, 0, 0, 7, 0, 0, 0, 0])
    confidence, right, count = demo.reliability(predicted, digits)
    np.testing.assert_allclose(confidence, [0.55, 0.95])
    np.testing.assert_allclose(right, [1, 0.75])
    np.testing.assert_array_equal(count, [4, 4])
    assert demo.calibration_error(predicted, digits) == pytest.approx((0.45 + 0.2) / 2)
    assert demo.accuracy(predicted, digits) == 7 / 8


def test_certainty_falls_into_the_last_bin() -> None:
    certain = np.log(np.array([[1.0, 0.0], [1.0, 0.0]]) + 1e-300)
    assert demo.calibration_error(certain, np.array([0, 0])) == pytest.approx(0)
    assert demo.calibration_error(certain, np.array([0, 1])) == pytest.approx(0.5)


def test_mean_of_predictions_neither_overflows_nor_underflows() -> None:
    members = np.array([[-1000.0, -2000.0], [-1000.0, -1000.0]])
    np.testing.assert_allclose(demo.mean_prediction(members, 0), [-1000, -1000 - np.log(2)])
    np.testing.assert_allclose(demo.mean_prediction(members[None], (0, 1)), [-1000, -1000 - np.log(2)])


def test_a_perfectly_calibrated_predictor_reads_what_binomial_noise_gives() -> None:
    """1,000 digits at confidence 0.9 in one bin: |mean - 0.9| of Bernoullis, sd s = sqrt(.09/1000), mean s sqrt(2/pi).

    The mean over 200 repeats has a standard error of 0.6 s / sqrt(200) = 0.043 s; at 5 of them, false alarms happen
    with probability below 1e-6 over seeds, and the seed is fixed.
    """
    predicted = np.tile(np.log([0.9, 0.1]), (1000, 1))
    sd = np.sqrt(0.09 / 1000)
    assert demo._calibration_noise(predicted) == pytest.approx(sd * np.sqrt(2 / np.pi), abs=5 * 0.043 * sd)


def test_jackknife_is_the_standard_error_of_a_mean_where_the_logarithm_is_straight() -> None:
    """log mean p_k = log p + mean d_k for p_k = p (1 + d_k), up to d^2: the standard error is sd(d) / sqrt(K)."""
    deviations = 1e-4 * np.array([0.3, -1.2, 0.7, 2.0, -0.4, 0.1])
    right = 0.6 * (1 + deviations)
    members = np.log(np.stack([right, 1 - right], axis=-1))[:, None].repeat(5, axis=1)
    wanted = np.std(deviations, ddof=1) / np.sqrt(6)
    assert demo.jackknife(members, np.zeros(5, int)) == pytest.approx(wanted, rel=1e-3)


def test_other_errors_add_in_quadrature() -> None:
    noise = np.tile([1.0, -1.0], 50)
    assert demo.Difference.of(noise, np.zeros(100), 0.3, 0.4).error == pytest.approx(np.sqrt(1 / 99 + 0.25))


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shift", "word"), [(0.5, "better (+0.500"), (-0.5, "worse (-0.500"), (0.0, "no differently (+0.000")]
)
def test_a_difference_counts_beyond_two_standard_errors(shift: float, word: str) -> None:
    noise = np.tile([1.0, -1.0], 50)  # standard error 0.1005
    assert str(demo.Difference.of(shift + noise, np.zeros(100))).startswith(word)
    assert demo.Difference.of(0.19 + noise, np.zeros(100)).sign == 0


def changed(result: demo.Comparison, better: float) -> demo.Comparison:
    """Elastic chains that predict what the independent ones do, with log-probabilities of the digits raised."""
    independent = result.schemes["independent"]
    raised = independent.log_probabilities.copy()
    raised[..., np.arange(len(result.digits)), result.digits] += better
    elastic = dataclasses.replace(result.schemes["elastic"], log_probabilities=raised)
    return dataclasses.replace(result, schemes={**result.schemes, "elastic": elastic})


@pytest.mark.parametrize(
    ("better", "words"),
    [
        (0.0, "there is no sign here"),
        (1.0, "Springs gave more here"),
        (-1.0, "springs cost something"),
    ],
)
def test_words_follow_the_numbers(result: demo.Comparison, better: float, words: str) -> None:
    said = " ".join(demo.findings(changed(result, better)))
    assert words in said
    assert sum(other in said for other in ("no sign here", "gave more", "cost something")) == 1
    assert "none of these is coupled" in said
    assert "coupled: their law is narrower than the posterior" in said


def test_coupled_draws_are_named_and_win_nothing(result: demo.Comparison) -> None:
    tied = dataclasses.replace(changed(result, 1.0), pull=np.ones(len(result.steps)))
    said = " ".join(demo.findings(tied))
    assert "springs acted on 100% of the averaged elastic draws" in said
    assert "none of these is coupled" not in said
    assert "gave more" not in said


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_table_words_and_picture(result: demo.Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.png"
    demo.show(result, path)
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 120
    assert sum("one state " in line for line in lines) == len(demo.checkpoints(result)) == 6
    last = len(result.steps) - 1
    for scheme in result.schemes.values():
        assert scheme.name in printed.out
        value, right, error = demo.scores(demo.predictions(scheme, result, last)["average"], result.digits)
        cell = f"{value:.3f} {right:.1%} {error:5.1%}"
        assert any("average" in line and cell in line for line in lines)
    assert str(path) in printed.err

    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = image.imread(path)[..., :3]
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 1000
    shown = {tuple(colour) for colour in np.round(255 * pixels.reshape(-1, 3)).astype(int).tolist()}
    for colour in demo.COLOURS.values():
        assert tuple(bytes.fromhex(colour[1:])) in shown
