"""A figure beside its goal: what is kept, what is missed, and what only a longer run can say."""

from campaigns.common import Result, at_least, at_most, none
from campaigns.goals import CAMPAIGNS


def result(**measured: float) -> Result:
    goals = {"wrong": none(), "kills": at_least(50), "slowest": at_most(1.0)}
    return Result("x", 1.0, 0, measured, goals)


def verdicts(found: Result) -> dict[str, str]:
    return {figure: verdict for figure, _, _, verdict in found.rows()}


def test_a_promise_that_is_not_kept_breaks_a_run_of_any_length() -> None:
    """A count that a short run lacks, or a time that a machine needs, does not."""
    found = result(wrong=1, kills=3, slowest=2.0)
    assert verdicts(found) == {"wrong": "MISSED", "kills": "short run", "slowest": "MISSED"}
    assert found.is_broken()
    assert not result(wrong=0, kills=3, slowest=2.0).is_broken()


def test_what_was_not_measured_is_missed() -> None:
    """A campaign that ended in an error says nothing, and that is no success."""
    found = result(kills=60)
    assert verdicts(found) == {"wrong": "MISSED", "kills": "ok", "slowest": "MISSED"}
    assert found.is_broken()


def test_every_campaign_has_a_promise() -> None:
    assert all(
        any(goal.kind == "must" for goal in campaign.goals.values()) for campaign in CAMPAIGNS.values()
    )
