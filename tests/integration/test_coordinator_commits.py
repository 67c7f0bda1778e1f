"""Commits of the coordinator on real Postgres: each row counts once, under the newest lease of its segment."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ray_job.contract.leases import Commit, CommitResponse, CommittedRows, Lease, PartUrlsRequest, SegmentRef
from ray_job.contract.object_keys import is_part_key
from ray_job.contract.plans import bitmap_rows
from service.coordinator.commits import MAX_PART_URLS, MAX_REASON_CHARACTERS, commit, part_urls
from service.coordinator.errors import JobEndedError, RefusedError
from service.db import Pool, query
from service.reconciler.jobs import split_gpu_seconds
from tests.integration.coordinator_harness import ROWS, STOPPED, TOKENS, Coordinated, FakeJob, committed, lines_of


@pytest.fixture
def stack(pool: Pool) -> Coordinated:
    return Coordinated(pool)


def test_commit_of_all_rows_ends_a_segment(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    job = stack.start_job()
    first, _ = job.lease()
    assert job.commit(first)
    segment, batch = stack.segment(), stack.batch()
    assert (segment["is_done"], segment["rows_done"], segment["job_id"]) == (True, "f", None)
    assert (batch["segments_left"], batch["status"]) == (1, "in_progress")


def test_commit_of_some_rows_keeps_the_lease(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    assert job.commit(lease, rows=[1])
    segment = stack.segment()
    assert (segment["is_done"], segment["rows_done"], segment["job_id"]) == (False, "2", job.id)
    assert stack.batch()["segments_left"] == 1
    assert job.commit(lease, rows=[0, 2, 3])
    assert stack.batch()["segments_left"] == 0


def test_commits_add_up_in_the_batch(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    job = stack.start_job()
    first, second = job.lease()
    job.commit(first, failed=1)
    job.commit(second, rows=[0])
    batch = stack.batch()
    assert (batch["completed"], batch["failed"]) == (4, 1)
    tokens = [batch[f"{kind}_tokens"] for kind in ("input", "output", "cached", "reasoning")]
    assert tokens == [50, 10, 15, 5]
    assert batch["progress_at"] is not None
    assert batch["progress_at"] == batch["last_commit_at"]


def test_commit_adds_to_the_tokens_of_its_job(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    first = stack.start_job()
    leases = first.lease()
    first.commit(leases[0])
    stack.expire_leases()
    second = stack.start_job()
    (again,) = second.lease()
    second.commit(again, rows=[0, 1])
    rows = stack.sql("SELECT job_id, tokens FROM job_batches ORDER BY tokens")
    assert [(row["job_id"], row["tokens"]) for row in rows] == [(second.id, 24), (first.id, 48)]


def test_rate_begins_at_the_first_lease_and_follows_later_commits(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 3)
    job = stack.start_job()
    first, second, third = job.lease()
    stack.change("b", "first_leased_at = now() - interval '2 s'")
    job.commit(first)
    assert stack.batch()["rows_per_s"] == pytest.approx(2, rel=0.2)
    job.commit(second)  # at once: 4 rows in no time add about 4 / 60
    assert stack.batch()["rows_per_s"] == pytest.approx(2, rel=0.2)
    stack.change("b", "progress_at = now() - interval '600 s'")
    job.commit(third)
    assert stack.batch()["rows_per_s"] == pytest.approx(4 / 600, rel=0.1)


def test_watchers_of_the_batch_and_the_reconciler_are_notified(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    with stack.pool.connection() as listening:
        listening.autocommit = True
        listening.execute("LISTEN batches")
        listening.execute("LISTEN batch_events")
        job.commit(lease)
        notices = list(listening.notifies(timeout=5, stop_after=2))
        listening.execute("UNLISTEN *")
        listening.autocommit = False
    assert {(notice.channel, notice.payload) for notice in notices} == {("batches", "b"), ("batch_events", "b")}


# Fencing


def test_commit_after_the_lease_expired_counts_until_the_segment_is_leased_again(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    zombie = stack.start_job()
    first, second = zombie.lease()
    stack.expire_leases()
    assert zombie.commit(first)
    job = stack.start_job()
    (again,) = job.lease()
    assert not zombie.commit(second)
    assert job.commit(again)
    assert stack.batch()["completed"] == 2 * ROWS


def test_commit_under_an_older_lease_of_the_same_job_is_refused(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (old,) = job.lease()
    stack.expire_leases()
    (new,) = job.lease()
    assert not job.commit(old)
    assert job.commit(new)


def test_commit_under_the_lease_of_another_job_is_refused(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    first = stack.start_job()
    (lease,) = first.lease(1)
    second = stack.start_job()
    second.lease()
    assert not second.commit(lease)
    assert stack.batch()["completed"] == 0


def test_commit_of_a_batch_that_was_never_leased_is_refused(stack: Coordinated) -> None:
    stack.add()
    ref = SegmentRef(batch_id="b", segment=0, epoch=0)
    assert stack.start_job().send("b", committed(ref)).accepted == (False,)
    assert stack.sql("SELECT key FROM parts") == []


@pytest.mark.parametrize("reason", sorted(STOPPED.keys() - {"paused"}))
def test_commit_for_a_stopped_batch_is_refused(stack: Coordinated, reason: str) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    stack.change("b", STOPPED[reason])
    assert not job.commit(lease)
    assert (stack.batch()["completed"], stack.sql("SELECT key FROM parts")) == (0, [])


def test_what_a_paused_batch_has_done_counts(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    stack.change("b", STOPPED["paused"])
    assert job.commit(lease)
    assert stack.batch()["completed"] == ROWS


def test_commit_waits_for_a_cancel_in_progress_and_is_refused(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    with ThreadPoolExecutor(1) as executor, stack.pool.connection() as cancelling:
        cancelling.execute("UPDATE batches SET status = 'cancelling'")
        committing = executor.submit(job.commit, lease)
        cancelling.commit()
        assert committing.result(timeout=5) is False


def test_commit_of_a_deleted_batch_is_refused(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    stack.sql("DELETE FROM batches")
    assert not job.commit(lease)


def test_ended_job_cannot_commit(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    stack.sql("UPDATE jobs SET ended_at = now()")
    with pytest.raises(JobEndedError):
        job.commit(lease)


# Once only


def test_repeated_commit_gets_the_first_answer_and_counts_once(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    job = stack.start_job()
    first, second = job.lease()
    stale = replace(committed(second), epoch=99)
    key = job.part_key("b")
    answers = [job.send("b", committed(first), stale, key=key) for _ in range(3)]
    assert {answer.accepted for answer in answers} == {(True, False)}
    assert stack.batch()["completed"] == ROWS
    assert len(stack.sql("SELECT key FROM parts")) == 1


def test_repeated_commit_gets_the_first_answer_after_the_batch_has_ended(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    key = job.part_key("b")
    job.send("b", committed(lease), key=key)
    stack.change("b", "status = 'finalizing'")
    assert job.send("b", committed(lease), key=key).accepted == (True,)


def at_once(*calls: Callable[[], CommitResponse]) -> list[CommitResponse]:
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], CommitResponse]) -> CommitResponse:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as executor:
        return list(executor.map(run, calls))


def test_same_commit_from_two_threads_counts_once(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 20)
    job = stack.start_job()
    for lease in job.lease():
        key = job.part_key("b")

        def send(lease: Lease = lease, key: str = key) -> CommitResponse:
            return job.send("b", committed(lease), key=key)

        assert [answer.accepted for answer in at_once(send, send)] == [(True,), (True,)]
    batch = stack.batch()
    assert (batch["completed"], batch["segments_left"]) == (20 * ROWS, 0)
    assert len(stack.sql("SELECT key FROM parts")) == 20


def test_two_parts_with_the_same_rows_from_two_threads_count_once(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 20)
    job = stack.start_job()
    for lease in job.lease():

        def send(lease: Lease = lease) -> CommitResponse:
            return job.send("b", committed(lease))

        assert sorted(answer.accepted for answer in at_once(send, send)) == [(False,), (True,)]
    assert stack.batch()["completed"] == 20 * ROWS


def test_rows_that_overlap_committed_ones_are_refused(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    assert job.commit(lease, rows=[0, 1])
    assert not job.commit(lease, rows=[1, 2])
    assert stack.segment()["rows_done"] == "3"
    assert job.commit(lease, rows=[2, 3])


def test_rows_beyond_the_segment_are_refused(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    assert not job.commit(lease, rows=[0, ROWS])
    assert not job.commit(lease, rows=[])
    assert not job.send("b", committed(replace(lease, segment=7))).accepted[0]


def test_part_with_a_refused_segment_records_the_refused_lines(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    zombie = stack.start_job()
    first, second = zombie.lease()
    stack.sql("UPDATE segments SET leased_until = now() - interval '1 s' WHERE number = 1")
    stack.start_job().lease(1)
    key = zombie.part_key("b")
    assert zombie.send("b", committed(second), committed(first), key=key).accepted == (False, True)
    (part,) = stack.sql("SELECT * FROM parts")
    assert (part["key"], part["batch_id"], part["job_id"]) == (key, "b", zombie.id)
    assert (part["accepted"], part["refused_lines"]) == ([False, True], list(lines_of(1)))
    assert stack.batch()["completed"] == ROWS


# Messages that contradict themselves


def test_key_of_another_job_or_batch_is_refused(stack: Coordinated) -> None:
    stack.add()
    stack.add("other")
    job, _ = stack.start_job(), stack.start_job("p")
    (lease, *_) = job.lease()
    good = job.part_key("b")
    keys = [
        job.part_key("other"),
        good.replace(job.id, "job-0"),
        f"{good}x",
        good.replace("parts", "plan"),
        "",
        f"../{good}",
    ]
    for key in keys:
        record = Commit(batch_id="b", key=key, segments=(committed(lease),))
        with pytest.raises(RefusedError, match="key"):
            commit(stack.pool, job.id, record)


WRONG: dict[str, Callable[[CommittedRows], tuple[CommittedRows, ...]]] = {
    "no segment": lambda _: (),
    "a segment twice": lambda entry: (entry, entry),
    "a line twice": lambda entry: (replace(entry, lines=(1, 1, 2, 3)),),
    "a line in two segments": lambda entry: (entry, replace(entry, segment=1)),
    "counts that do not add up": lambda entry: (replace(entry, completed=ROWS + 1),),
    "fewer lines than rows": lambda entry: (replace(entry, lines=(1,), completed=1),),
    "no bitmap": lambda entry: (replace(entry, rows="0xf"),),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=list(WRONG))
def test_commit_that_contradicts_itself_is_refused(
    stack: Coordinated, change: Callable[[CommittedRows], tuple[CommittedRows, ...]]
) -> None:
    stack.add(tokens=[TOKENS] * 2)
    job = stack.start_job()
    lease, _ = job.lease()
    with pytest.raises(RefusedError) as refused:
        job.send("b", *change(committed(lease)))
    assert refused.value.status_code == 400
    assert stack.batch()["completed"] == 0


# Failures


def test_commit_resets_the_failures_of_its_domain(stack: Coordinated) -> None:
    stack.add()
    stack.add("own", domain="p")
    stack.sql("UPDATE domains SET failures = 3, not_before = now()")
    job = stack.start_job()
    (lease,) = job.lease()
    assert not job.commit(lease, rows=[])
    assert [row["failures"] for row in stack.sql("SELECT failures FROM domains")] == [3, 3]
    assert job.commit(lease)
    rows = stack.sql("SELECT domain, failures, not_before FROM domains ORDER BY domain DESC")
    assert [(row["failures"], row["not_before"] is None) for row in rows] == [(0, True), (3, False)]


def test_segment_given_back_can_be_leased_again(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    job.give_back(lease)
    assert stack.segment()["failures"] == 1
    assert stack.sql("SELECT idle_since IS NOT NULL AS idle FROM jobs")[0]["idle"]
    (again,) = job.lease()
    assert again.epoch == 2
    assert job.commit(again)


def test_segment_of_an_older_lease_or_of_another_job_is_not_given_back(stack: Coordinated) -> None:
    stack.add()
    first = stack.start_job()
    (old,) = first.lease()
    stack.expire_leases()
    second = stack.start_job()
    (new,) = second.lease()
    first.give_back(old)
    first.give_back(new)
    assert (stack.segment()["failures"], stack.segment()["job_id"]) == (0, second.id)


def test_segment_given_back_four_times_gives_up_its_batch(stack: Coordinated) -> None:
    stack.add(tokens=[TOKENS] * 2)
    stack.add("other")
    job = stack.start_job()
    for failures in range(4):
        assert stack.batch()["giving_up_at"] is None
        lease = next(lease for lease in job.lease() if (lease.batch_id, lease.segment) == ("b", 0))
        job.give_back(lease, reason="PlanError" + "!" * 5_000)
        assert stack.segment()["failures"] == failures + 1
    batch = stack.batch()
    assert (batch["giving_up_code"], batch["status"]) == ("job_failed", "in_progress")
    assert batch["giving_up_message"].startswith("Segment 0 of the batch's plan could not be run 4 times: PlanError!")
    assert len(batch["giving_up_message"]) < MAX_REASON_CHARACTERS + 200
    (event,) = stack.sql("SELECT data FROM batch_events WHERE type = 'batch.giving_up'")
    assert event["data"]["code"] == "job_failed"
    assert stack.batch("other")["giving_up_at"] is None
    assert job.lease() == ()


def test_batch_is_locked_before_its_segment_is_given_back(stack: Coordinated) -> None:
    """A commit locks in the same order, so neither waits for the other."""
    stack.add()
    stack.sql("UPDATE segments SET failures = 3")
    job = stack.start_job()
    (lease,) = job.lease()
    with ThreadPoolExecutor(1) as executor, stack.pool.connection() as committing:
        committing.execute("SELECT FROM batches FOR NO KEY UPDATE")
        giving_back = executor.submit(job.give_back, lease)
        time.sleep(0.3)
        assert not giving_back.done()
        committing.execute("SELECT FROM segments FOR UPDATE NOWAIT")
        committing.commit()
        giving_back.result(timeout=5)
    assert stack.batch()["giving_up_at"] is not None


def test_batches_are_locked_before_the_job_whose_gpu_seconds_are_split(stack: Coordinated) -> None:
    """A commit locks in the same order, so neither waits for the other."""
    stack.add()
    job = stack.start_job()
    (lease,) = job.lease()
    job.commit(lease)
    stack.sql("UPDATE jobs SET gpus = 1, split_at = now() - interval '60 s'")

    def split() -> None:
        with stack.pool.connection() as connection:
            split_gpu_seconds(connection, [job.id], is_last=False)

    with ThreadPoolExecutor(1) as executor, stack.pool.connection() as committing:
        committing.execute("SELECT FROM batches FOR NO KEY UPDATE")
        splitting = executor.submit(split)
        time.sleep(0.3)
        assert not splitting.done()
        committing.execute("SELECT FROM jobs FOR UPDATE NOWAIT")
        committing.commit()
        splitting.result(timeout=5)
    assert stack.batch()["gpu_seconds"] == pytest.approx(60, abs=5)


def test_ended_job_cannot_give_back(stack: Coordinated) -> None:
    job = stack.start_job()
    job.end()
    with pytest.raises(JobEndedError):
        job.give_back(
            Lease(
                batch_id="b",
                segment=0,
                epoch=1,
                endpoint="",
                url="",
                start=0,
                end=0,
                rows=0,
                tokens=0,
                done="",
                cache_salt="",
            )
        )


# Places for parts


def test_part_urls_are_new_keys_of_the_job(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    job.lease()
    parts = part_urls(stack.pool, stack.store, job.id, PartUrlsRequest(batch_id="b", count=5)).parts
    assert len({part.key for part in parts}) == 5
    assert all(is_part_key(part.key, batch_id="b", job_id=job.id) for part in parts)
    assert [part.url for part in parts] == [f"memory:///{part.key}" for part in parts]


@pytest.mark.parametrize("count", [0, MAX_PART_URLS + 1])
def test_number_of_part_urls_is_limited(stack: Coordinated, count: int) -> None:
    job = stack.start_job()
    with pytest.raises(RefusedError, match=f"from 1 to {MAX_PART_URLS}"):
        part_urls(stack.pool, stack.store, job.id, PartUrlsRequest(batch_id="b", count=count))


def test_batch_that_was_never_leased_or_has_ended_has_no_part_urls(stack: Coordinated) -> None:
    stack.add()
    job = stack.start_job()
    request = PartUrlsRequest(batch_id="b", count=1)
    with pytest.raises(RefusedError) as refused:
        part_urls(stack.pool, stack.store, job.id, request)
    assert refused.value.status_code == 404
    job.lease()
    stack.change("b", "status = 'cancelling'")
    assert part_urls(stack.pool, stack.store, job.id, request).parts == ()


def test_rows_of_a_lease_run_again_after_the_job_ended_without_a_commit(stack: Coordinated) -> None:
    stack.add()
    first = stack.start_job()
    (lease,) = first.lease()
    first.commit(lease, rows=[3])
    with stack.pool.connection() as connection:
        values = {"job_id": first.id, "now": stack.batch()["created_at"], "reason": "killed", "is_gone": True}
        for name in ("lock_domain_of_job", "release_leases", "end_job"):
            connection.execute(query(name), values)
    (again,) = stack.start_job().lease()
    assert (bitmap_rows(again.done), again.epoch) == ({3}, 2)


# Random interleavings


@dataclass
class Held:
    """A lease that a job believes to hold, and the rows that it has not committed."""

    job: FakeJob
    lease: Lease
    rows: set[int] = field(default_factory=set)


class Interleavings(RuleBasedStateMachine):
    """Jobs and zombies that lease, lose, commit and end in any order, while clients pause and cancel.

    ``counted`` holds each row whose commit was accepted: none may appear twice, and the database must agree.
    """

    pool: Pool
    owner_url: str
    stack: Coordinated

    @initialize(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3))
    def prepare(self, sizes: list[int]) -> None:
        self.stack = Coordinated(self.pool)
        with psycopg.connect(self.owner_url) as owner:
            owner.execute("TRUNCATE jobs, domains, batches, projects CASCADE")
        self.sizes = {f"b{number}": size for number, size in enumerate(sizes)}
        for number, (batch_id, size) in enumerate(self.sizes.items()):
            self.stack.add(batch_id, project=f"p{number % 2}", tokens=[TOKENS] * size)
        self.jobs = [self.stack.start_job()]
        self.held: list[Held] = []
        self.counted: set[tuple[str, int, int]] = set()
        self.cancelled: set[str] = set()
        self.paused: set[str] = set()

    def take(self, job: FakeJob, tokens: int) -> None:
        try:
            leases = job.lease(tokens)
        except JobEndedError:
            return
        for lease in leases:
            assert lease.batch_id not in self.paused | self.cancelled
            done = bitmap_rows(lease.done)
            assert done == {
                row for batch, segment, row in self.counted if (batch, segment) == (lease.batch_id, lease.segment)
            }
            self.held.append(Held(job, lease, set(range(ROWS)) - done))

    @rule(place=st.integers(0, 5), tokens=st.sampled_from([1, 2 * TOKENS, 10**6]))
    def lease(self, place: int, tokens: int) -> None:
        self.take(self.jobs[place % len(self.jobs)], tokens)

    @rule()
    def expire(self) -> None:
        self.stack.expire_leases()

    @rule(place=st.integers(0, 9), mask=st.integers(1, 2**ROWS - 1), is_repeated=st.booleans())
    def commit(self, place: int, mask: int, *, is_repeated: bool) -> None:
        if not self.held:
            return
        held = self.held[place % len(self.held)]
        lease, rows = held.lease, {row for row in held.rows if mask >> row & 1}
        key = held.job.part_key(lease.batch_id)
        try:
            (counts,) = held.job.send(lease.batch_id, committed(lease, rows), key=key).accepted
            if is_repeated and counts:
                assert held.job.send(lease.batch_id, committed(lease, rows), key=key).accepted == (True,)
        except JobEndedError:
            return
        if counts:
            assert lease.batch_id not in self.cancelled
            named = {(lease.batch_id, lease.segment, row) for row in rows}
            assert not named & self.counted
            self.counted |= named
            # ``rows`` stay in held.rows at random: a confused job commits them again.
            if not is_repeated:
                held.rows -= rows

    @rule(place=st.integers(0, 9))
    def extend(self, place: int) -> None:
        if not self.held:
            return
        held = self.held[place % len(self.held)]
        try:
            if held.job.lost(held.lease):
                self.held.remove(held)
        except JobEndedError:
            self.held.remove(held)

    @rule(place=st.integers(0, 5))
    def end(self, place: int) -> None:
        try:
            self.jobs[place % len(self.jobs)].end()
        except JobEndedError:
            return

    @rule()
    def start(self) -> None:
        self.jobs.append(self.stack.start_job())

    @rule(place=st.integers(0, 2))
    def pause_or_resume(self, place: int) -> None:
        batch_id = f"b{place % len(self.sizes)}"
        is_paused = batch_id in self.paused
        self.stack.change(batch_id, "paused_at = NULL" if is_paused else "paused_at = now()")
        self.paused ^= {batch_id}

    @rule(place=st.integers(0, 20))
    def cancel(self, place: int) -> None:
        batch_id = f"b{place}"
        if batch_id in self.sizes:
            self.stack.change(batch_id, "status = 'cancelling'")
            self.cancelled.add(batch_id)

    @invariant()
    def database_agrees(self) -> None:
        for batch_id, size in self.sizes.items():
            batch = self.stack.batch(batch_id)
            rows = {(segment, row) for batch, segment, row in self.counted if batch == batch_id}
            assert batch["completed"] == len(rows)
            done = [number for number in range(size) if {(number, row) for row in range(ROWS)} <= rows]
            assert batch["segments_left"] == size - len(done)

    def teardown(self) -> None:
        """Let a last job finish: no row may be lost."""
        if not hasattr(self, "sizes"):
            return
        self.stack.sql("UPDATE batches SET paused_at = NULL")
        self.paused.clear()
        self.stack.expire_leases()
        job = self.stack.start_job()
        self.held.clear()
        self.take(job, 10**6)
        for held in self.held:
            assert job.commit(held.lease, held.rows)
        for batch_id, size in self.sizes.items():
            if batch_id not in self.cancelled:
                batch = self.stack.batch(batch_id)
                assert (batch["completed"], batch["segments_left"]) == (size * ROWS, 0)


def test_random_interleavings_never_lose_or_double_a_row(pool: Pool, database_url: str) -> None:
    run_state_machine_as_test(
        type("Interleaved", (Interleavings,), {"pool": pool, "owner_url": database_url}),
        settings=settings(
            max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
