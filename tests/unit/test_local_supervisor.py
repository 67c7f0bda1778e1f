"""When a dead child is started again."""

from service.local.supervisor import describe_exit, plan_restart


def test_a_child_that_lived_long_is_started_again_at_once() -> None:
    plan = plan_restart(quick_deaths=7, lived_s=600, now_s=1000)
    assert plan.quick_deaths == 1
    assert plan.start_at_s == 1000.25


def test_quick_deaths_wait_twice_as_long_each_time() -> None:
    delays = [plan_restart(quick_deaths=deaths, lived_s=1, now_s=0).start_at_s for deaths in range(5)]
    assert delays == [0.25, 0.5, 1, 2, 4]


def test_the_wait_has_an_upper_end() -> None:
    assert plan_restart(quick_deaths=50, lived_s=1, now_s=0).start_at_s == 15


def test_an_exit_is_told_in_words() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-9) == "was killed by signal 9"
