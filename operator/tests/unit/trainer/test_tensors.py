"""What a push refuses before its first call to the fleet. Without torch: tensors are objects with the fields that are read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang_rollout.trainer import PushFailed, connect
from sglang_rollout.trainer.tensors import Source, clean_name, full_tensor
from tests.unit.trainer.support.scripted_fleet import FakeFleet, document


@dataclass
class Tensor:
    shape: tuple[int, ...] = (2, 3)
    dtype: str = "torch.bfloat16"
    layout: str = "torch.strided"
    is_meta: bool = False
    size: int = 2

    def element_size(self) -> int:
        return self.size


@dataclass
class Grid:
    ranks: list[int]

    def flatten(self) -> Grid:
        return self

    def tolist(self) -> list[int]:
        return self.ranks


@dataclass
class Mesh:
    mesh: Grid
    own: tuple[int, ...] | None = (0,)
    device_type: str = "cuda"

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.own


@dataclass
class Device:
    type: str


@dataclass
class Sharded(Tensor):
    device_mesh: Mesh = field(default_factory=lambda: Mesh(Grid([0, 1])))
    device: Device = field(default_factory=lambda: Device("cuda"))
    moves: list[str] = field(default_factory=list)

    def detach(self) -> Sharded:
        return self

    def to(self, device: str) -> Sharded:
        self.moves.append(device)
        return self

    def full_tensor(self) -> str:
        return "full"


def mesh(*ranks: int, own: tuple[int, ...] | None = (0,)) -> Mesh:
    return Mesh(Grid(list(ranks)), own)


def checked(tensors: Any, specs: Any = None, model: Any = None) -> Source:
    source = Source(tensors, specs)
    source.check(1 << 20)
    if model is not None:
        source.compare(model)
    return source


def test_names_are_cleaned_to_those_of_the_checkpoint() -> None:
    raw = "_orig_mod.model.layers.0._checkpoint_wrapped_module.mlp._fsdp_wrapped_module._orig_mod.up_proj.weight"
    assert clean_name(raw) == "model.layers.0.mlp.up_proj.weight"
    assert clean_name("my_orig_mod.weight") == "my_orig_mod.weight"
    (spec,) = checked({raw: Tensor()}).specs
    assert (spec.name, spec.dtype, spec.shape, spec.nbytes) == ("model.layers.0.mlp.up_proj.weight", "bfloat16", (2, 3), 12)


class Array:
    """As NumPy's and JAX's arrays: the weight must not be left out."""

    shape = (2, 3)
    dtype = "float32"


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({}, "there is no tensor to push"),
        (iter(()), "there is no tensor to push"),
        ([Tensor()], "an entry is of type Tensor, not a pair of name and tensor"),
        ({"w": 3}, "'w' is of type int, not a torch tensor; if it holds no weights, leave it out"),
        ({"w": Array()}, "'w' is of type Array, not a torch tensor; convert it to one, for example with torch.from_numpy"),
        ({"": Tensor()}, "'' is not the name of a tensor"),
        ({"_orig_mod": Tensor()}, "'_orig_mod' is not the name of a tensor"),
        ({"w": Tensor(is_meta=True)}, "Tensor 'w' is on the meta device"),
        ({"w": Tensor(layout="torch.sparse_coo")}, "only dense tensors"),
        ({"w": Tensor(dtype="torch.qint8")}, "has the type qint8, which cannot be sent; convert it to one of float64, "),
        ({"w": Tensor(shape=(0, 3))}, "no bytes to send"),
        ([("w", Tensor()), ("w", Tensor())], "appears twice"),
        ({"a.w": Tensor(), "a._orig_mod.w": Tensor()}, "'a.w' and 'a._orig_mod.w' are both the tensor 'a.w'"),
        ({"w": Sharded(device_mesh=mesh(2, 3, own=None))}, "on a mesh of ranks [2, 3], which this rank is not part of"),
        ({"a": Sharded(), "b": Sharded(device_mesh=mesh(0, 2))}, "Tensor 'b' is on a mesh of ranks [0, 2], other tensors"),
    ],
)
def test_a_tensor_that_cannot_be_sent_is_refused(tensors: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        checked(tensors)


def test_tied_weights_are_sent_under_both_names() -> None:
    tied = Tensor()
    state = {"model.embed_tokens.weight": tied, "lm_head.weight": tied}
    source = checked(state, model={"model.embed_tokens.weight": [2, 3]})
    assert [spec.name for spec, tensor in source if tensor is tied] == list(state)


def test_ranks_are_those_of_the_largest_mesh() -> None:
    assert Source({"a": Tensor()}).ranks == ()
    assert Source(iter([("a", Sharded())])).ranks == (0, 1)
    both = {"a": Sharded(device_mesh=mesh(0, 2)), "b": Sharded(device_mesh=mesh(3, 2, 1, 0)), "c": Tensor()}
    assert checked(both).ranks == (0, 1, 2, 3)


def test_shards_in_host_memory_are_gathered_by_the_meshs_device() -> None:
    offloaded, there = Sharded(device=Device("cpu")), Sharded()
    assert [full_tensor(offloaded), full_tensor(there)] == ["full", "full"]
    assert (offloaded.moves, there.moves) == (["cuda"], [])


SPECS = [("_orig_mod.a", (2, 3), "torch.bfloat16"), ("b", [4], "float32")]
A, B, C = ("a", Tensor()), ("b", Tensor((4,), "torch.float32", size=4)), ("c", Tensor())


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ([A, C], "the tensors give 'c' (bfloat16 [2, 3]) where specs has 'b' (float32 [4])."),
        ([A, ("b", Tensor((4,)))], "the tensors give 'b' (bfloat16 [4]) where specs has 'b' (float32 [4])."),
        ([A], "the tensors end where specs has 'b' (float32 [4])."),
        ([A, B, C], "the tensors give 'c' (bfloat16 [2, 3]) where specs has no tensor."),
    ],
)
def test_tensors_must_match_specs(tensors: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        checked(tensors, SPECS)
    lazy = checked(iter(tensors), SPECS)
    assert [spec.name for spec in lazy.specs] == ["a", "b"]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        list(lazy)
    assert [spec.name for spec, _ in checked(iter([A, B]), SPECS)] == ["a", "b"]


def test_specs_are_checked_before_an_iterator_is_read() -> None:
    for specs, sentence in (
        ([("a", (2, 3), "complex64")], "type complex64"),
        ([*SPECS, ("a", (1,), "int8")], "appears twice"),
    ):
        with pytest.raises(ValueError, match=sentence):
            checked(iter([("a", Tensor())]), specs)
    with pytest.raises(ValueError, match=r"'b' is not in the engines' model"):
        checked(iter([("a", Tensor())]), SPECS, {"a": [2, 3]})


def test_names_and_shapes_are_compared_with_the_engines_model() -> None:
    model = {"a": [2, 3], "packed": None, "c": [7]}
    checked({"a": Tensor(), "packed": Tensor()}, model=model)
    with pytest.raises(ValueError, match=r"Tensor 'c' has shape \[2, 3\], in the engines' model \[7\]. Tensor 'd' is not in"):
        checked({"c": Tensor(), "d": Tensor()}, model=model)
    with pytest.raises(ValueError, match="And 5 more"):
        checked({f"x{i}": Tensor() for i in range(10)}, model=model)
    lazy = checked(iter([("a", Tensor()), ("d", Tensor())]), model=model)
    with pytest.raises(ValueError, match="'d' is not in the engines' model"):
        list(lazy)


def test_an_iterator_must_yield_a_dtensor_first() -> None:
    with pytest.raises(ValueError, match="pass a list or a state dict"):
        list(checked(iter([("a", Tensor()), ("b", Sharded())])))


def test_a_refused_push_only_reads(fake: FakeFleet) -> None:
    fake.replies["/fleet"] = (200, document(fleet_id="f"))
    fake.replies["/fleet/tensors"] = (200, {"engine": "demo-engine-0", "shapes": {"a": [2, 3]}})
    with connect(fake.url) as fleet:
        for tensors in ({"a": Tensor(), "b": Tensor()}, {"a": 1}, {}):
            with pytest.raises(PushFailed) as failed:
                fleet.push(tensors, version=1)
            assert failed.value.phase == "prepare"
        assert "Tensor 'b' is not in the engines' model. Nothing was sent, and the fleet is unchanged." in _first(fleet)
    assert {path for path, _ in fake.calls} == {"/fleet/health", "/health", "/fleet", "/fleet/tensors"}
    assert fake.counts["/fleet/tensors"] == 1, "read once per epoch"


def _first(fleet: Any) -> str:
    with pytest.raises(PushFailed) as failed:
        fleet.push({"b": Tensor()}, version=1)
    return str(failed.value)
