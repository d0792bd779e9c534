"""The cache: stored values are read back, and damaged files are misses."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monetrun.core import codec
from monetrun.core.errors import UsageError
from monetrun.core.graph import MOST_BYTES
from monetrun.core.plan import STATUSES, GraphPlan, NamedImplementation, Plan, Schedule, Step
from monetrun.machine.entry_file import header
from monetrun.machine.store import Store, default_root, key
from support.paths import ROOT as REPOSITORY


@dataclass(frozen=True, slots=True)
class Measured:
    seconds: float
    workspace_bytes: int = 0


# every example writes a file, which takes as long as the disk takes
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

steps = st.lists(st.builds(Step, st.integers(0, 5000), st.integers(0, 3)), max_size=20).map(tuple)
numbers = st.integers(0, 5000)
reads = st.lists(numbers, max_size=3).map(tuple)


@st.composite
def graph_plans(draw: st.DrawFn) -> GraphPlan:
    schedule = draw(st.builds(Schedule, steps, steps))
    used = sorted({(s.operator, s.implementation) for s in schedule.forward + schedule.backward if s.implementation})
    named = (NamedImplementation(*pair, draw(st.text()), draw(reads), draw(st.none() | numbers)) for pair in used)
    return GraphPlan(draw(st.text()), draw(st.text()), schedule, tuple(named))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    budget_bytes = draw(st.integers(1, MOST_BYTES))
    overhead = draw(st.floats(0, allow_infinity=False))
    return Plan(
        graphs=tuple(draw(st.lists(graph_plans(), max_size=3))),
        budget_bytes=budget_bytes,
        plain_peak_bytes=draw(st.integers(0, MOST_BYTES)),
        planned_peak_bytes=draw(st.integers(0, budget_bytes)),
        overhead=overhead,
        bound=draw(st.floats(0, overhead)),
        status=draw(st.sampled_from(STATUSES)),
        solver=draw(st.text()),
        device=draw(st.text()),
        torch_version=draw(st.text()),
        ledger=draw(st.dictionaries(st.text(), st.integers(-MOST_BYTES, MOST_BYTES))),
    )


PLAN = Plan(
    graphs=(
        GraphPlan(
            "f",
            "s",
            Schedule((Step(0), Step(1, 2)), (Step(0), Step(3))),
            (NamedImplementation(1, 2, "output", (1, 3), None),),
        ),
    ),
    budget_bytes=10 << 30,
    plain_peak_bytes=20 << 30,
    planned_peak_bytes=9 << 30,
    overhead=0.05,
    bound=0.04,
    status="feasible",
    solver="hierarchical",
    device="cpu",
    torch_version="2.15.0",
    ledger={"weights": 7},
)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "monetrun"]


# ---- what is kept ----------------------------------------------------------------------------------------------------


@settings(patient, max_examples=50)
@given(plans())
def test_a_stored_value_is_read_back(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = Store(Path(folder))
        path = cache.put("plan", "k", plan)
        assert path == Path(folder) / "plan" / "k.json"
        assert cache.get("plan", "k", Plan) == plan
        assert [p.name for p in path.parent.iterdir()] == ["k.json"]  # nothing half-written is left beside it


def test_a_later_put_replaces_the_value_and_another_process_reads_it(tmp_path: Path) -> None:
    Store(tmp_path).put("probe", "k", Measured(1.0))
    Store(tmp_path).put("probe", "k", Measured(2.0))
    assert Store(tmp_path).get("probe", "k", Measured) == Measured(2.0)


def test_a_missing_entry_is_a_miss_without_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Store(tmp_path / "none").get("plan", "k", Plan) is None
    assert Store(tmp_path / "none").get_mapping("costs", "k", Measured) == {}
    assert warnings_in(caplog) == []
    assert not (tmp_path / "none").exists()


def test_kinds_do_not_mix(tmp_path: Path) -> None:
    cache = Store(tmp_path)
    cache.put("probe", "k", Measured(1.0))
    assert cache.get("costs", "k", Measured) is None


@pytest.mark.parametrize("bad", ["", "../x", "a/b", ".hidden", "a b", "x" * 129, "ä"])
def test_a_key_that_is_not_a_plain_file_name_is_rejected(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ValueError, match="key"):
        Store(tmp_path).put("plan", bad, PLAN)


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="kind is 'model', it must be one of plan, probe, sources, plain, costs"):
        Store(tmp_path).get("model", "k", Plan)


def test_a_value_without_a_json_form_leaves_the_old_one(tmp_path: Path) -> None:
    cache = Store(tmp_path)
    cache.put("probe", "k", Measured(1.0))
    with pytest.raises(ValueError, match="JSON"):
        cache.put("probe", "k", Measured(float("nan")))
    with pytest.raises(ValueError, match="JSON"):
        cache.update("costs", "k", {"a": Measured(float("inf"))}, Measured)
    assert cache.get("probe", "k", Measured) == Measured(1.0)
    assert not (tmp_path / "costs").exists()


# ---- what is damaged -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intact() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Store(Path(folder)).put("plan", "k", PLAN)
        assert path is not None
        return path.read_bytes()


def got_from(content: bytes) -> Plan | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan" / "k.json"
        path.parent.mkdir()
        path.write_bytes(content)
        return Store(Path(folder)).get("plan", "k", Plan)


@settings(patient, max_examples=200)
@given(st.data())
def test_any_truncation_is_a_miss(intact: bytes, data: st.DataObject) -> None:
    assert got_from(intact) == PLAN
    assert got_from(intact[: data.draw(st.integers(0, len(intact) - 1))]) is None


@settings(patient, max_examples=400)
@given(st.data())
def test_any_flipped_bit_is_a_miss(intact: bytes, data: st.DataObject) -> None:
    damaged = bytearray(intact)
    damaged[data.draw(st.integers(0, len(intact) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert got_from(bytes(damaged)) is None


@patient
@given(st.binary(max_size=200))
def test_any_foreign_file_is_a_miss(content: bytes) -> None:
    assert got_from(content) is None


def test_deep_nesting_does_not_exhaust_the_parser() -> None:
    assert got_from(b"[" * 1000) is None
    assert got_from(b"[" * 1_000_000) is None


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"monetrun":2', b'"monetrun":0', "written with schema 0, this monetrun reads 2"),
        (b'"key":"k"', b'"key":"j"', "holds 'plan' 'j', not 'plan' 'k'"),
        (b'"type":"Plan"', b'"type":"Flan"', "holds a 'Flan', not a 'Plan'"),
        (b'"budget_bytes":10737418240', b'"budget_bytes":10737418241', "the checksum does not match"),
        (b'"status":"feasible"', b'"status":"fea"', "bytes where"),
        (b'{"monetrun"', b'{"menotrun"', "not a file of monetrun's cache"),
    ],
)
def test_a_damaged_file_gives_one_warning_that_names_it_and_the_reason(
    intact: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture, old: bytes, new: bytes, reason: str
) -> None:
    assert intact.count(old) == 1
    path = tmp_path / "plan" / "k.json"
    path.parent.mkdir()
    path.write_bytes(intact.replace(old, new))
    cache = Store(tmp_path)
    assert cache.get("plan", "k", Plan) is None
    assert cache.get("plan", "k", Plan) is None
    (message,) = warnings_in(caplog)
    assert message.startswith(f"{path} is not used: ")
    assert reason in message
    assert cache.entries()[0].problem or reason.startswith("holds a ")  # a type that only the reader knows to be wrong
    cache.put("plan", "k", PLAN)
    assert cache.get("plan", "k", Plan) == PLAN


def test_a_value_of_an_older_shape_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @dataclass(frozen=True)
    class Newer:
        seconds: float
        kernel: str

    Newer.__name__ = "Measured"
    cache = Store(tmp_path)
    cache.put("probe", "k", Measured(1.0))
    assert cache.get("probe", "k", Newer) is None
    assert "has no field 'workspace_bytes'" in warnings_in(caplog)[0]


def test_a_folder_in_an_entrys_place_is_a_miss_and_is_not_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plan" / "k.json").mkdir(parents=True)
    cache = Store(tmp_path)
    assert cache.get("plan", "k", Plan) is None
    assert cache.put("plan", "k", PLAN) is None
    assert "Is a directory" in warnings_in(caplog)[0]
    assert cache.entries()[0].problem.endswith(f"Is a directory: '{tmp_path}/plan/k.json'")


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("fifo", "not a regular file"),
        ("device", "not a regular file"),
        ("loop", "Too many levels of symbolic links"),
        ("huge", "bytes, where a file of the cache has"),
        ("deep", "nested too deeply"),
        ("nan", "NaN is not a number in JSON"),
        ("infinite", "$.seconds: inf is not a finite number"),
        ("range", "$.workspace_bytes: 100000000000000000000 is out of range"),
    ],
)
def test_what_no_run_has_written_is_a_miss_with_a_reason_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, reason: str
) -> None:
    cache = Store(tmp_path)
    path = cache.path("costs", "k")
    path.parent.mkdir()
    texts = {
        "deep": "[" * 100_000,
        "nan": '{"seconds":NaN}',
        "infinite": '{"seconds":1e999}',
        "range": '{"seconds":1.0,"workspace_bytes":100000000000000000000}',
    }
    if what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "loop":
        path.symlink_to(path)
    elif what == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        body = texts[what].encode()
        path.write_bytes(header("costs", "k", "Measured", body) + body + b"\n")
    assert cache.get("costs", "k", Measured) is None
    (warning,) = warnings_in(caplog)
    assert reason in warning
    assert str(path) in warning
    assert len(cache.entries()) == 1
    cache.put("costs", "k", Measured(1.0))
    assert cache.get("costs", "k", Measured) == Measured(1.0)


def test_an_entry_names_the_script_of_its_launch_and_a_changed_name_is_a_changed_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Store(tmp_path, script="train.py").put("costs", "k", Measured(1.0))
    cache = Store(tmp_path)
    assert [(entry.script, entry.problem) for entry in cache.entries()] == [("train.py", "")]
    assert cache.get("costs", "k", Measured) == Measured(1.0)
    path = cache.path("costs", "k")
    path.write_bytes(path.read_bytes().replace(b"train.py", b"other.py"))
    assert cache.get("costs", "k", Measured) is None
    assert "checksum" in warnings_in(caplog)[0]
    Store(tmp_path, script="a\nb").put("costs", "k", Measured(1.0))
    assert cache.entries()[0].script == ""


def test_a_value_that_its_reader_cannot_use_is_a_miss_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(value: Measured) -> None:
        raise UsageError(f"{value.seconds} seconds are too many", "take fewer")

    cache = Store(tmp_path)
    cache.put("costs", "k", Measured(9.0))
    assert cache.get("costs", "k", Measured, refuse) is None
    assert warnings_in(caplog) == [f"{cache.path('costs', 'k')} is not used: 9.0 seconds are too many"]
    assert cache.get("costs", "k", Measured, lambda value: None) == Measured(9.0)


def test_a_folder_that_cannot_be_written_gives_one_warning_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = Store(tmp_path / "file" / "cache")
    assert cache.put("plan", "k", PLAN) is None
    assert cache.put("plan", "j", PLAN) is None
    assert cache.update("costs", "k", {"a": Measured(1.0)}, Measured) == {"a": Measured(1.0)}
    assert cache.get("plan", "k", Plan) is None
    assert cache.entries() == ()
    assert cache.clear() == 0
    assert cache.remove("plan", "k") is False
    assert warnings_in(caplog) == [f"{cache.root} cannot be written, going on without it: Not a directory"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_value_and_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    cache = Store(tmp_path)
    cache.put("probe", "k", Measured(1.0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"monetrun.machine.store.os.{step}", full)
        assert cache.put("probe", "k", Measured(2.0)) is None
        assert cache.put("probe", "k", Measured(3.0)) is None
    assert cache.get("probe", "k", Measured) == Measured(1.0)
    assert [p.name for p in (tmp_path / "probe").iterdir()] == ["k.json"]
    assert warnings_in(caplog) == [f"{tmp_path} cannot be written, going on without it: No space left on device"]


# ---- several processes -----------------------------------------------------------------------------------------------

ADD = """
import sys
from dataclasses import dataclass
from pathlib import Path
from monetrun.machine.store import Store

@dataclass(frozen=True)
class Measured:
    seconds: float
    workspace_bytes: int = 0

cache, rank = Store(Path(sys.argv[1])), int(sys.argv[2])
for i in range(40):
    new = {f"own-{rank}-{i}": Measured(float(rank), i), f"shared-{i}": Measured(float(rank))}
    cache.update("costs", "device", new, Measured)
    cache.put("plan", "k", Measured(float(rank), i))
    assert cache.get("plan", "k", Measured) is not None
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    writers = [
        subprocess.Popen([sys.executable, "-c", ADD, str(tmp_path), str(rank)], env=environ, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    assert [writer.communicate(timeout=120)[1] for writer in writers] == [b"", b""]  # no warning either
    assert [writer.returncode for writer in writers] == [0, 0]
    found = Store(tmp_path).get_mapping("costs", "device", Measured)
    for rank in range(2):
        for i in range(40):
            assert found[f"own-{rank}-{i}"] == Measured(float(rank), i)
    assert len(found) == 120


def test_the_first_measurement_stays_unless_replace_is_set(tmp_path: Path) -> None:
    cache = Store(tmp_path)
    assert cache.update("costs", "k", {"a": Measured(1.0)}, Measured) == {"a": Measured(1.0)}
    merged = {"a": Measured(1.0), "b": Measured(2.0)}
    assert cache.update("costs", "k", {"a": Measured(9.0), "b": Measured(2.0)}, Measured) == merged
    assert Store(tmp_path).get_mapping("costs", "k", Measured) == merged
    cache.update("costs", "k", {"a": Measured(9.0)}, Measured, replace=True)
    assert Store(tmp_path).get_mapping("costs", "k", Measured)["a"] == Measured(9.0)


def test_a_damaged_mapping_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = Store(tmp_path)
    cache.update("costs", "k", {"a": Measured(1.0)}, Measured)
    cache.path("costs", "k").write_bytes(b"{}")
    assert cache.update("costs", "k", {"b": Measured(2.0)}, Measured) == {"b": Measured(2.0)}
    assert cache.get_mapping("costs", "k", Measured) == {"b": Measured(2.0)}
    assert len(warnings_in(caplog)) == 1


def test_a_writer_that_waits_too_long_goes_on_without_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = Store(tmp_path, lock_seconds=0.05)
    cache.put("probe", "k", Measured(1.0))
    with open(tmp_path / ".lock", "rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cache.put("probe", "k", Measured(2.0)) is None
        assert cache.get("probe", "k", Measured) == Measured(1.0)  # reading waits for nobody
    assert "another process holds the lock for over 0.05 s" in warnings_in(caplog)[0]
    assert cache.put("probe", "k", Measured(2.0)) is not None


def test_a_file_system_without_locks_is_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("monetrun.machine.store.fcntl.flock", no_locks)
    cache = Store(tmp_path)
    cache.put("probe", "k", Measured(1.0))
    assert cache.get("probe", "k", Measured) == Measured(1.0)
    assert "file system without locks" in warnings_in(caplog)[0]


# ---- keys, folders, housekeeping -------------------------------------------------------------------------------------


def test_a_key_is_the_same_in_every_process_and_differs_between_parts() -> None:
    assert key("ResNet-50", 16, 0.5, None, Step(1, 2)) == "a5c6bb36b12cf62c3f80a8be2d13fc41"
    assert (
        len({key("ab", "c"), key("a", "bc"), key("abc"), key("a", "b", "c"), key(("a", "bc")), key(1), key("1")}) == 7
    )
    with pytest.raises(TypeError):
        key(object())


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_root({"MONETRUN_CACHE": "/a/b", "XDG_CACHE_HOME": "/c"}) == Path("/a/b")
    assert default_root({"XDG_CACHE_HOME": "/c"}) == Path("/c/monetrun")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root({}) == tmp_path / ".cache" / "monetrun"
    assert default_root({"XDG_CACHE_HOME": "relative"}) == tmp_path / ".cache" / "monetrun"
    assert default_root({"MONETRUN_CACHE": "~/x"}) == tmp_path / "x"
    monkeypatch.chdir(tmp_path)
    assert default_root({"MONETRUN_CACHE": "here"}) == tmp_path / "here"


def test_without_a_home_folder_the_variable_to_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UsageError, match="MONETRUN_CACHE"):
        default_root({})


def test_entries_are_listed_with_what_is_wrong_with_them(tmp_path: Path) -> None:
    cache = Store(tmp_path)
    assert cache.entries() == ()
    path = cache.put("plan", "p", PLAN)
    assert path is not None
    cache.update("costs", "c", {"a": Measured(1.0)}, Measured)
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "x.json").write_text("hello")
    plan, probe, costs = cache.entries()
    assert (plan.kind, plan.key, plan.type, plan.path, plan.problem) == ("plan", "p", "Plan", path, "")
    assert plan.size_bytes == path.stat().st_size
    assert (probe.kind, probe.key, probe.type, probe.problem) == ("probe", "x", "", "not a file of monetrun's cache")
    assert (costs.kind, costs.key, costs.type, costs.problem) == ("costs", "c", "mapping", "")


def test_removing_and_clearing_touch_only_the_stores_own_files(tmp_path: Path) -> None:
    cache = Store(tmp_path)
    for kind, name in (("plan", "a"), ("plan", "b"), ("probe", "c")):
        cache.put(kind, name, Measured(1.0))
    (tmp_path / "thesis.txt").write_text("precious")
    (tmp_path / "plan" / "notes.txt").write_text("precious")
    (tmp_path / "plan" / ".a.1.ff.json.tmp").write_text("left by a killed writer")
    assert cache.remove("plan", "a") is True
    assert cache.remove("plan", "a") is False
    assert cache.clear("probe") == 1
    assert [entry.key for entry in cache.entries()] == ["b"]
    assert cache.clear() == 1
    left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert left == [".lock", "plan/notes.txt", "thesis.txt"]


def test_a_stored_file_is_two_lines_of_json(tmp_path: Path) -> None:
    path = Store(tmp_path).put("probe", "k", Measured(0.5, 7))
    assert path is not None
    header, value = path.read_text().splitlines()
    assert '"kind":"probe","key":"k","type":"Measured"' in header
    assert codec.loads(Measured, value) == Measured(0.5, 7)


def test_warnings_go_through_the_packages_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "k.json").write_text("x")
    with caplog.at_level(logging.ERROR, logger="monetrun"):
        Store(tmp_path).get("plan", "k", Plan)
    assert caplog.records == []
