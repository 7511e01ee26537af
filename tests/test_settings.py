"""What the user may write, and the one sentence for what they may not."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hydra_plugins.hydra_gpu_pool_launcher._errors import ConfigurationError
from hydra_plugins.hydra_gpu_pool_launcher._model import Settings
from hydra_plugins.hydra_gpu_pool_launcher._settings import DEFAULTS, checked, shown

TOP = [key for key in DEFAULTS if key != "ddp"]
KEYS = [*TOP, *(f"ddp.{key}" for key in DEFAULTS["ddp"])]


def raw(**values: Any) -> dict[str, Any]:
    """Plain values as ``checked`` takes them; ``ddp__nnodes`` is ddp.nnodes."""
    ddp = {key[5:]: value for key, value in values.items() if key.startswith("ddp__")}
    top = {key: value for key, value in values.items() if not key.startswith("ddp__")}
    return {**top, "ddp": ddp} if ddp else top


def refusal(**values: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        checked(raw(**values))
    return str(caught.value)


def test_nothing_given_is_the_table_of_the_manual() -> None:
    settings = checked({})
    assert (settings.gpus, settings.one_gpu, settings.per_gpu, settings.gpus_per_job) == ("auto", False, 1, 1)
    assert (settings.cpu_slots, settings.mode, settings.start_method) == (None, "single", "auto")
    assert (settings.threads_per_job, settings.stagger_s, settings.timeout_min) == (None, 0, None)
    assert (settings.kill_grace_s, settings.max_retries, sorted(settings.retry_on)) == (10, 0, ["crash", "oom"])
    assert (settings.fail_fast, settings.resume, settings.min_free_gpu_mem_gb) == (False, False, None)
    assert (settings.vendor, settings.mem_caps) == ("auto", True)
    assert (settings.share, settings.output, settings.progress) == (True, "file", "auto")
    ddp = settings.ddp
    assert (ddp.nproc_per_node, ddp.nnodes, ddp.node_rank) == (None, 1, 0)
    assert (ddp.rdzv_endpoint, ddp.rdzv_timeout_s, ddp.max_restarts) == ("localhost:0", 300, 0)


def test_the_defaults_written_out_are_the_defaults_left_out() -> None:
    assert checked(DEFAULTS) == checked({})


@pytest.mark.parametrize(
    ("given_", "ids"),
    [
        ("auto", "auto"),
        (" auto ", "auto"),
        (2, ("2",)),
        (0, ("0",)),
        ("2", ("2",)),
        ("0,1", ("0", "1")),
        (" 0 , 1 ", ("0", "1")),
        ([1, 0], ("1", "0")),
        ((1, 0), ("1", "0")),
        (range(3), ("0", "1", "2")),
        ([0, "1"], ("0", "1")),
        ("GPU-ab", ("GPU-ab",)),
        (" GPU-ab,GPU-cd", ("GPU-ab", "GPU-cd")),
        (["MIG-GPU-ab/1/0", " MIG-cd "], ("MIG-GPU-ab/1/0", "MIG-cd")),
        ([1, "01", 0, " 1", "GPU-a", "GPU-a"], ("1", "0", "GPU-a")),
        ([], ()),
    ],
)
def test_gpus_may_be_given_as_number_list_or_string(given_: Any, ids: Any) -> None:
    assert checked({"gpus": given_}).gpus == ids


@pytest.mark.parametrize(("given_", "one"), [(2, True), (" 2 ", True), ("auto", False), ([2], False), ("2,2", False)])
def test_only_a_bare_number_may_have_been_meant_as_a_count(given_: Any, one: bool) -> None:
    assert checked({"gpus": given_}).one_gpu is one


NO_ID = [
    -1,
    True,
    False,
    1.0,
    math.nan,
    None,
    "",
    "all",
    "-1",
    "+1",
    "1.0",
    "gpu-ab",
    "GPU-",
    "GPU-é",
    "²",
    "٣",
    b"0",
    10**40,
]


@pytest.mark.parametrize(
    "value",
    [*NO_ID, "  ", "0,,1", "0,1,", ",", "GPU-a b", "GPU-a\0", "9" * 5000, {"a": 1}],
)
def test_what_is_no_gpu_is_refused(value: Any) -> None:
    assert refusal(gpus=value).startswith("hydra.launcher.gpus=")


@pytest.mark.parametrize("value", [*NO_ID, "0,1", "GPU-a,GPU-b", "auto", [0]])
def test_what_is_no_id_is_refused_in_a_list_too(value: Any) -> None:
    assert refusal(gpus=[0, value]).startswith("hydra.launcher.gpus=[0, ")


@pytest.mark.parametrize("key", ["per_gpu", "gpus_per_job", "cpu_slots", "threads_per_job", "max_retries"])
@pytest.mark.parametrize("value", [-1, "2", True, 1.5, 2.0, math.nan, math.inf, "", "two", [1], {}])
def test_a_count_is_a_whole_number_and_nothing_else(key: str, value: Any) -> None:
    message = refusal(**{key: value})
    assert message.startswith(f"hydra.launcher.{key}={shown(value)}: expected ")
    assert "a whole number" in message


@pytest.mark.parametrize(
    "key", ["stagger_s", "timeout_min", "kill_grace_s", "min_free_gpu_mem_gb", "ddp__rdzv_timeout_s"]
)
@pytest.mark.parametrize("value", [-0.1, "2", True, math.nan, math.inf, -math.inf, 10**400, "", [1.0]])
def test_a_length_of_time_or_memory_is_a_finite_number(key: str, value: Any) -> None:
    message = refusal(mode="ddp", **{key: value})
    assert message.startswith(f"hydra.launcher.{key.replace('__', '.')}=")
    assert "number, " in message


@pytest.mark.parametrize("key", ["per_gpu", "gpus_per_job", "cpu_slots", "threads_per_job", "timeout_min"])
def test_zero_is_refused_where_it_would_mean_nothing_ever_runs(key: str) -> None:
    assert refusal(**{key: 0}).startswith(f"hydra.launcher.{key}=0: expected ")


@pytest.mark.parametrize("key", [key for key in TOP if DEFAULTS[key] is not None])
def test_null_is_refused_unless_it_is_the_default(key: str) -> None:
    assert refusal(**{key: None}).startswith(f"hydra.launcher.{key}=null: expected ")


@pytest.mark.parametrize("key", ["fail_fast", "resume", "mem_caps", "share"])
@pytest.mark.parametrize("value", [0, 1, "true", "yes", [], 1.0])
def test_yes_and_no_are_booleans_only(key: str, value: Any) -> None:
    assert refusal(**{key: value}) == f"hydra.launcher.{key}={value!r}: expected true or false."


@pytest.mark.parametrize("value", ["crash", [["crash"]], ["Crash"], [True], ["crash", ""], {"crash": 1}])
def test_retry_on_is_a_list_of_known_words(value: Any) -> None:
    assert "expected a list of crash, oom, timeout, error" in refusal(retry_on=value)


@pytest.mark.parametrize("key", ["mode", "start_method", "output", "progress"])
def test_an_unknown_word_is_answered_with_the_known_ones(key: str) -> None:
    assert refusal(**{key: "Auto"}).startswith(f"hydra.launcher.{key}='Auto': expected one of ")


def test_the_sentence_names_key_value_and_what_would_be_right() -> None:
    assert refusal(per_gpu="two") == "hydra.launcher.per_gpu='two': expected a whole number from 1 to 1000."


def test_plain_python_names_keys_without_hydra() -> None:
    with pytest.raises(ConfigurationError, match=r"^per_gpu=0: "):
        checked({"per_gpu": 0}, prefix="")


@pytest.mark.parametrize(
    ("values", "wrong", "nearest"),
    [
        ({"gpu_per_job": 2}, "hydra.launcher.gpu_per_job=2", "hydra.launcher.gpus_per_job"),
        ({"dpp": {}}, "hydra.launcher.dpp={}", "hydra.launcher.ddp"),
        ({"ddp": {"nnode": 2}}, "hydra.launcher.ddp.nnode=2", "hydra.launcher.ddp.nnodes"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(values: Any, wrong: str, nearest: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        checked(values)
    assert str(caught.value) == f"{wrong}: there is no such key, the nearest is {nearest}."


@pytest.mark.parametrize("value", [None, 2, "nnodes", []])
def test_ddp_is_a_mapping(value: Any) -> None:
    assert refusal(ddp=value).startswith(f"hydra.launcher.ddp={shown(value)}: expected a mapping")


@pytest.mark.parametrize(
    ("key", "value"),
    [("nproc_per_node", 2), ("nnodes", 2), ("rdzv_endpoint", "a:1"), ("rdzv_timeout_s", 1), ("max_restarts", 1)],
)
def test_a_ddp_key_is_refused_in_single_mode(key: str, value: Any) -> None:
    message = refusal(ddp={key: value})
    assert message == f"hydra.launcher.ddp.{key}={value!r}: only with hydra.launcher.mode: ddp."


def test_ddp_keys_at_their_defaults_are_no_ddp() -> None:
    assert checked({"ddp": dict(DEFAULTS["ddp"])}) == checked({})


@pytest.mark.parametrize("rank", [2, 3])
def test_a_node_rank_is_less_than_the_number_of_nodes(rank: int) -> None:
    assert "expected less than ddp.nnodes=2" in refusal(mode="ddp", ddp={"nnodes": 2, "node_rank": rank})


@pytest.mark.parametrize(
    "value", ["", "host", ":1", "host:", "host:x", "host:65536", "::1:29500", "a b:1", 29500, None]
)
def test_an_endpoint_is_host_and_port(value: Any) -> None:
    assert "expected host:port" in refusal(mode="ddp", ddp__rdzv_endpoint=value)


@pytest.mark.parametrize("value", ["node0:29500", "10.0.0.1:64536", "[fe80::1]:1", "localhost:0"])
def test_names_and_addresses_make_an_endpoint(value: str) -> None:
    assert checked(raw(mode="ddp", ddp__rdzv_endpoint=value)).ddp.rdzv_endpoint == value


def test_an_endpoint_leaves_room_for_the_ports_of_a_thousand_jobs() -> None:
    message = refusal(mode="ddp", ddp__rdzv_endpoint="node0:64537")
    assert "expected a port of at most 64536, since job i meets on the port + i % 1000" in message


@pytest.mark.parametrize(
    ("key", "value"), [("max_retries", 1), ("fail_fast", True), ("resume", True), ("timeout_min", 5)]
)
def test_what_would_put_machines_out_of_step_is_refused_over_several_nodes(key: str, value: Any) -> None:
    nodes = {"nnodes": 2, "rdzv_endpoint": "node0:29500"}
    assert refusal(mode="ddp", ddp=nodes, **{key: value}).startswith(f"hydra.launcher.{key}={shown(value)}: not with ")


@pytest.mark.parametrize("share", [True, False])
def test_slots_may_be_shared_or_not_over_several_nodes_too(share: bool) -> None:
    nodes = {"nnodes": 2, "rdzv_endpoint": "node0:29500"}
    assert checked({"mode": "ddp", "ddp": nodes, "share": share}).share is share


def test_several_nodes_need_a_port_that_all_of_them_know() -> None:
    assert refusal(mode="ddp", ddp__nnodes=2).startswith("hydra.launcher.ddp.rdzv_endpoint='localhost:0': ")


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("per_gpu", 3, 3),
        ("gpus_per_job", 2, 2),
        ("cpu_slots", 5, 5),
        ("threads_per_job", 4, 4),
        ("kill_grace_s", 0, 0),
        ("kill_grace_s", 2.5, 2.5),
        ("start_method", "fork", "fork"),
        ("stagger_s", 0.5, 0.5),
        ("timeout_min", 1, 1),
        ("max_retries", 1, 1),
        ("start_method", "forkserver", "forkserver"),
        ("start_method", "spawn", "spawn"),
        ("retry_on", ("oom", "crash", "oom"), {"crash", "oom"}),
        ("retry_on", ["crash", "timeout", "error"], {"crash", "timeout", "error"}),
        ("retry_on", [], set()),
        ("fail_fast", True, True),
        ("vendor", "auto", "auto"),
        ("vendor", "amd", "amd"),
        ("mem_caps", False, False),
        ("progress", "none", "none"),
        ("progress", "log", "log"),
    ],
)
def test_what_is_built_is_kept(key: str, value: Any, kept: Any) -> None:
    assert getattr(checked({key: value}), key) == kept


class Awkward:
    """A value of the user's that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError


def test_a_value_that_cannot_be_shown_is_refused_all_the_same() -> None:
    assert refusal(gpus=[Awkward()]).startswith("hydra.launcher.gpus=<list>: expected ")
    assert refusal(per_gpu=-(10**5000)).startswith("hydra.launcher.per_gpu=<int>: expected ")


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
ANYTHING = st.recursive(
    PLAIN | st.sampled_from(["auto", "ddp", "0,1", "GPU-a", 1, 2, 10**400]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(deadline=None)
@given(key=st.sampled_from(KEYS), value=ANYTHING, mode=st.sampled_from(["single", "ddp"]))
@example(key="progress", value="a\nb", mode="single")
@example(key="retry_on", value=["crash"] * 1000, mode="single")
def test_any_value_is_kept_or_refused_in_one_sentence_that_names_its_key(key: str, value: Any, mode: str) -> None:
    values = {"mode": mode, key.replace(".", "__"): value}
    try:
        kept = checked(raw(**values))
    except ConfigurationError as error:
        message = str(error)
        assert message.startswith((f"hydra.launcher.{key}=", "hydra.launcher.ddp.rdzv_endpoint='localhost:0': with "))
        assert message.endswith(".")
        assert "\n" not in message
        assert len(message) < 450
    else:
        assert isinstance(kept, Settings)
        assert hash(kept) == hash(checked(raw(**values)))


@pytest.mark.parametrize("key", ["per_gpu", "cpu_slots"])
def test_no_more_slots_than_a_machine_could_bear(key: str) -> None:
    assert getattr(checked({key: 1000}), key) == 1000
    assert "expected" in refusal(**{key: 1001})
