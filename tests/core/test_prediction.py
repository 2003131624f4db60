"""When resets are prepared, and what a wrong guess costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.core.prefetch import ResetPredictor

ENOUGH = 8


def _confirm(predictor, times):
    for _ in range(times):
        predictor.note_step()
        predictor.note_ends(any_finished=True)
        predictor.note_reset(plain=True)


def _trained():
    predictor = ResetPredictor()
    _confirm(predictor, ENOUGH)
    assert predictor.predicts_reset
    return predictor


def test_it_takes_enough_resets_in_a_row():
    predictor = ResetPredictor()
    _confirm(predictor, ENOUGH - 1)
    assert not predictor.predicts_reset
    _confirm(predictor, 1)
    assert predictor.predicts_reset


def test_steps_between_ends_do_not_matter():
    predictor = _trained()
    for _ in range(5):
        predictor.note_step()
        predictor.note_ends(any_finished=False)
    assert predictor.predicts_reset


def test_resets_that_follow_no_end_say_nothing():
    predictor = ResetPredictor()
    for _ in range(3 * ENOUGH):
        predictor.note_reset(plain=True)
    assert not predictor.predicts_reset


def test_a_step_past_the_end_before_the_first_guess_starts_anew():
    predictor = ResetPredictor()
    _confirm(predictor, ENOUGH - 1)
    predictor.note_step()
    predictor.note_ends(any_finished=True)
    predictor.note_step()  # past the end
    predictor.note_ends(any_finished=False)
    _confirm(predictor, ENOUGH - 1)
    assert not predictor.predicts_reset
    _confirm(predictor, 1)
    assert predictor.predicts_reset


def test_a_wrong_guess_ends_it_for_good():
    predictor = _trained()
    predictor.note_ends(any_finished=True)
    predictor.note_wrong_guess()
    assert not predictor.predicts_reset
    _confirm(predictor, 5 * ENOUGH)
    assert not predictor.predicts_reset


def test_a_seeded_reset_ends_it_for_a_while():
    predictor = _trained()
    predictor.note_ends(any_finished=True)
    predictor.note_reset(plain=False)
    assert not predictor.predicts_reset
    _confirm(predictor, ENOUGH)
    assert predictor.predicts_reset


def test_it_can_be_switched_off():
    predictor = ResetPredictor(enabled=False)
    _confirm(predictor, 5 * ENOUGH)
    assert not predictor.predicts_reset


events = st.lists(
    st.sampled_from(["step", "step and end", "plain reset", "seeded reset", "wrong guess"]),
    max_size=80,
)


@given(events=events)
def test_it_never_guesses_right_after_a_contradiction(events):
    predictor = ResetPredictor()
    has_guessed_wrong = False
    is_open = False
    in_a_row = 0
    for event in events:
        match event:
            case "step" | "step and end":
                predictor.note_step()
                if is_open:
                    in_a_row = 0
                    assert not predictor.predicts_reset
                is_open = event == "step and end"
                predictor.note_ends(any_finished=is_open)
            case "plain reset":
                predictor.note_reset(plain=True)
                in_a_row += is_open
                is_open = False
            case "seeded reset":
                predictor.note_reset(plain=False)
                in_a_row = 0 if is_open else in_a_row
                is_open = False
            case "wrong guess":
                if not predictor.predicts_reset:
                    continue  # nothing was prepared
                predictor.note_wrong_guess()
                has_guessed_wrong, is_open = True, False
        if predictor.predicts_reset:
            assert in_a_row >= ENOUGH
            assert not has_guessed_wrong
