"""The pace at which a worker counts its pool."""

import pytest

from pykvcache_connector.worker.housekeeping import PAUSE_RATIO
from pykvcache_storage.inventory import PAUSE_SECONDS_MAX, PAUSE_SECONDS_MIN, pause_after


@pytest.mark.parametrize(
    ("step_seconds", "pause_seconds"),
    [
        (0.0, PAUSE_SECONDS_MIN),
        (PAUSE_SECONDS_MIN / PAUSE_RATIO, PAUSE_SECONDS_MIN),
        (0.01, 0.01 * PAUSE_RATIO),
        (PAUSE_SECONDS_MAX / PAUSE_RATIO, PAUSE_SECONDS_MAX),
        (60.0, PAUSE_SECONDS_MAX),
    ],
)
def test_counting_pauses_in_proportion_to_its_steps_and_within_bounds(step_seconds, pause_seconds):
    assert pause_after(step_seconds, ratio=PAUSE_RATIO) == pytest.approx(pause_seconds)
