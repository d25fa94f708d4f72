from __future__ import annotations

from actors.core.service_rate import LONGEST_S, ServiceRate


def test_at_least_one_second_before_anything_is_known_and_when_all_is_fast() -> None:
    rate = ServiceRate(slots=4)
    assert rate.retry_after_s() == 1.0
    rate.note(0.01)
    assert rate.retry_after_s() == 1.0


def test_long_requests_on_few_slots_mean_a_long_wait_but_not_for_ever() -> None:
    rate = ServiceRate(slots=2)
    for _ in range(100):
        rate.note(20.0)
    assert 9.9 < rate.retry_after_s() <= 10.0
    for _ in range(100):
        rate.note(1e6)
    assert rate.retry_after_s() == LONGEST_S
