"""Groups and meshes: who is a member, what is refused, what is freed."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from mpi4py import MPI

import tparmpi as tpm
from tparmpi.comm import channel as channels
from tparmpi.comm.device import Device
from tparmpi.comm.mesh import _say_spread
from tparmpi.comm.runtime import world_state
from tparmpi.comm.settings import DeviceSettings
from tparmpi.errors import GroupError, UsageError

pytestmark = pytest.mark.mpi(min_size=4)


def stand_in(rank: int, kind: str = "cpu", **settings: object) -> Device:
    """A device that other ranks may be bound to, seen from this one."""
    supported = frozenset(settings.pop("supported", ("float32", "int64", "bool")))
    return Device(
        rank,
        kind,
        is_member=False,
        settings=DeviceSettings(**settings),
        supported_dtypes=supported,
        host="elsewhere",
        index=None,
        local_rank=0,
        transports=("host",),
    )


@pytest.fixture
def bound(monkeypatch):
    """Makes these devices the ones that ranks are bound to."""

    def pretend(*devices: Device) -> tuple[Device, ...]:
        monkeypatch.setattr(world_state(), "devices", devices)
        return devices

    return pretend


def test_devices_are_in_rank_order():
    devices = tpm.devices()
    assert [device.rank for device in devices] == list(range(len(devices)))
    assert tpm.device() is devices[tpm.world().rank]
    assert [device.is_member for device in devices].count(True) == 1
    assert tpm.device().backend.kind == "cpu"
    assert all(d.backend.kind == "meta" for d in devices if d is not tpm.device())


def test_a_group_knows_its_members():
    chosen = [tpm.devices()[rank] for rank in (3, 0, 2)]
    group = tpm.Device.group_options(chosen).init()
    here = tpm.device().rank
    assert group.devices == tuple(chosen)
    assert (group.size, group.axes, group.shape) == (3, ("group",), (3,))
    assert group.is_member == (here in (3, 0, 2))
    assert group.rank == {3: 0, 0: 1, 2: 2}.get(here, -1)
    assert group.coordinates == (max(group.rank, 0),)
    assert group.backend.kind == ("cpu" if group.is_member else "meta")
    assert group.axis_group(0) is group
    assert group.settings == DeviceSettings()
    group.close()


def test_views_for_gradients():
    group, mesh = tpm.group(tpm.devices()), tpm.mesh(a=2, b=2)
    for place in (tpm.device(), group, mesh):
        view = place.autodiff()
        assert view is place.autodiff() is view.autodiff()
        assert view.inner() is place
        assert (view.is_autodiff, place.is_autodiff) == (True, False)
        for name in ("devices", "size", "rank", "axes", "shape", "coordinates"):
            assert getattr(view, name) == getattr(place, name)
        assert view.axis_group(0) is place.axis_group(0)
    assert mesh.autodiff().axis("b").inner() is mesh.axis("b")
    assert [m.inner() for m in mesh.autodiff().split("a")] == mesh.split("a")
    with pytest.raises(GroupError, match="not a mesh"):
        group.autodiff().axis("a")
    group.close()
    mesh.close()


def test_refused_groups(bound):
    first, second = tpm.devices()[:2]
    for devices, words in [
        ([], "no devices are given"),
        ([first, second, first], "rank 0> is given twice"),
        ([first.autodiff()], "autodiff view"),
        ([first, stand_in(1)], "no rank is bound to"),
        ([stand_in(7)], "no rank is bound to"),
        ([first, tpm.world()], "is not a device"),
    ]:
        with pytest.raises(GroupError, match=words):
            tpm.group(devices)
    devices = bound(stand_in(0), stand_in(1, "cuda"))
    with pytest.raises(GroupError, match=r"rank 0> and <device cuda of rank 1> differ"):
        tpm.group(devices)
    devices = bound(stand_in(0, quantization="int8"), stand_in(1))
    with pytest.raises(GroupError, match="rank 0 quantizes with 'int8', rank 1 with"):
        tpm.group(devices)
    devices = bound(
        stand_in(0, float="float32", supported=("float32", "int64", "bool")),
        stand_in(1, float="float16", supported=("float16", "int64", "bool")),
    )
    with pytest.raises(GroupError, match=r"default float dtype \(float16, float32\)"):
        tpm.group(devices)


def test_default_dtypes_are_the_first_that_all_support(bound):
    everything = ("float16", "float32", "float64", "int32", "int64", "bool")
    devices = bound(
        stand_in(0, float="float64", int="int32", supported=everything),
        stand_in(1, float="float16", supported=(*everything[:2], "int64", "bool")),
        stand_in(2, float="float32", supported=everything),
    )
    # float64 and int32 do not run on rank 1.
    group, backwards = tpm.group(devices), tpm.group(devices[::-1])
    assert group.settings == DeviceSettings("float16", "int64", "bool")
    assert backwards.settings.float == "float32"
    group.close()
    backwards.close()


@pytest.fixture
def no_other_groups(together, monkeypatch) -> None:
    """What other tests have left open does not count."""
    monkeypatch.setattr(world_state(), "channels", {})


def test_too_many_groups(no_other_groups, monkeypatch):
    monkeypatch.setattr(channels, "GROUP_LIMIT", 6)
    pair = (tpm.devices()[3], tpm.devices()[1])
    if tpm.device() not in pair:
        return
    groups = [tpm.group(pair) for _ in range(6)]
    with pytest.raises(GroupError, match=r"ranks \(3, 1\) already have 6 groups"):
        tpm.group(pair)
    # Another order of the same members counts for itself, and a closed group does not.
    other = tpm.group(pair[::-1])
    groups.pop(2).close()
    groups.append(tpm.group(pair))
    for number, group in enumerate(groups):
        assert group.all_reduce(np.array(number)) == 2 * number
    for group in (*groups, other):
        group.close()


def test_the_real_limit(no_other_groups):
    pair = (tpm.devices()[3], tpm.devices()[1])
    if tpm.device() not in pair:
        return
    groups = [tpm.group(pair) for _ in range(channels.GROUP_LIMIT)]
    with pytest.raises(GroupError, match="65536"):
        tpm.group(pair)
    assert groups[-1].all_reduce(np.array(3)) == 6
    for group in groups:
        group.close()


def test_closing_frees_communicators():
    """More rounds than MPICH has communicators (2,046)."""
    trio = tpm.devices()[:3]
    if tpm.device() not in trio:
        return
    before = len(world_state().channels)
    for number in range(2100):
        group = tpm.group(trio)
        if number % 500 == 0:
            assert group.all_reduce(np.array(number)) == 3 * number
            assert group.comm.size == 3
        group.close()
        group.close()
    assert len(world_state().channels) == before


def test_equal_groups_share_one_communicator():
    one, two = tpm.group(tpm.devices()), tpm.group(tpm.devices())
    assert one is not two
    assert one._channel is two._channel
    assert MPI.Comm.Compare(one.comm, two.comm) == MPI.CONGRUENT
    assert one.comm is one.comm
    one.close()
    assert two.all_reduce(np.array(1)) == 4
    two.close()


def test_a_mesh_varies_its_last_axis_fastest():
    mesh = tpm.mesh(dp=2, tp=2)
    here = tpm.device().rank
    assert (mesh.axes, mesh.shape, mesh.rank) == (("dp", "tp"), (2, 2), here)
    assert mesh.coordinates == (here // 2, here % 2)
    row, column = mesh.axis("tp"), mesh.axis("dp")
    assert [d.rank for d in row.devices] == [here // 2 * 2, here // 2 * 2 + 1]
    assert [d.rank for d in column.devices] == [here % 2, here % 2 + 2]
    assert (row.axes, column.axes) == (("tp",), ("dp",))
    assert mesh.axis("tp") is row is mesh.axis_group(1)
    assert row.all_gather(np.array([here])).tolist() == [d.rank for d in row.devices]
    assert mesh.all_reduce(np.array(here)) == 6
    mesh.close()
    with pytest.raises(GroupError, match="closed"):
        mesh.barrier()
    with pytest.raises(GroupError, match="closed"):
        row.barrier()


def test_parts_of_a_mesh():
    mesh = tpm.mesh(pp=2, dp=1, tp=2)
    stages = mesh.split("pp")
    assert stages == mesh.split("pp")
    assert [[d.rank for d in stage.devices] for stage in stages] == [[0, 1], [2, 3]]
    assert [(s.axes, s.shape) for s in stages] == [(("dp", "tp"), (1, 2))] * 2
    here = tpm.device().rank
    for number, stage in enumerate(stages):
        assert stage.is_member == (here // 2 == number)
        if stage.is_member:
            group = stage.axis("tp")
            assert group.all_reduce(np.array(here)) == 4 * number + 1
    only = tpm.mesh(pp=4).split("pp")[here]
    assert (only.axes, only.shape, only.size) == ((), (), 1)
    mesh.close()


def test_a_factored_axis():
    mesh = tpm.mesh(tp=4)
    factored = mesh.factor("tp", kv=2, rep=2)
    assert (factored.axes, factored.shape) == (("kv", "rep"), (2, 2))
    assert factored.axis("kv").size == 2
    with pytest.raises(GroupError, match="kv=3 × rep=2 is 6, axis 'tp' has 4"):
        mesh.factor("tp", kv=3, rep=2)
    with pytest.raises(UsageError, match="no axis 'pp'"):
        mesh.factor("pp", a=1)
    mesh.close()
    factored.close()


def test_a_mesh_of_some_ranks():
    mesh = tpm.mesh(tpm.devices()[:3], tp=3)
    assert mesh.is_member == (tpm.device().rank < 3)
    if mesh.is_member:
        assert mesh.axis("tp").all_reduce(np.array(1)) == 3
    else:
        assert mesh.coordinates == (0,)
        assert not mesh.axis("tp").is_member
    mesh.close()


def test_refused_meshes():
    with pytest.raises(GroupError, match="dp=2 × tp=3 is 6, there are 4 devices"):
        tpm.mesh(dp=2, tp=3)
    with pytest.raises(UsageError, match="no axes"):
        tpm.mesh()
    for size in (0, -1, 2.0, True):
        with pytest.raises(UsageError, match="positive size"):
            tpm.mesh(tp=size)
    with pytest.raises(UsageError, match="cannot be named"):
        tpm.mesh(shape=4)
    with pytest.raises(UsageError, match="has no axis 'pp'; it has 'tp'"):
        tpm.mesh(tp=4).axis("pp")


def test_ranks_that_ask_for_different_meshes_all_refuse():
    sizes = {"dp": 4, "tp": 1} if tpm.device().rank == 3 else {"dp": 2, "tp": 2}
    with pytest.raises(
        GroupError, match=r"rank 0 asks for dp=2 × tp=2, rank 3 for dp=4"
    ):
        tpm.mesh(**sizes)
    mesh = tpm.mesh(dp=2, tp=2)
    assert mesh.all_reduce(np.array(1)) == 4
    mesh.close()


def test_init_may_be_repeated_but_not_changed():
    assert tpm.init() is tpm.device()
    assert tpm.init(MPI.COMM_WORLD, DeviceSettings()) is tpm.device()
    with pytest.raises(UsageError, match="settings are fixed"):
        tpm.init(settings=DeviceSettings(float="float64"))
    with pytest.raises(UsageError, match="another communicator"):
        tpm.init(MPI.COMM_SELF)


def on_hosts(*hosts: str) -> list[Device]:
    """The ranks' devices, as if they were on these hosts."""
    return [
        Device(
            device.rank,
            device.kind,
            is_member=device.is_member,
            settings=device.settings,
            supported_dtypes=device.supported_dtypes,
            host=host,
            index=device.index,
            local_rank=device.local_rank,
            transports=device.transports,
        )
        for device, host in zip(tpm.devices(), hosts, strict=True)
    ]


def test_tensor_parallel_groups_that_span_nodes_are_warned_of_once(bound):
    devices = bound(*on_hosts("a", "a", "b", "b"))
    _say_spread.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for axes in ({"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}, {"pp": 4}):
            tpm.mesh(devices, **axes).close()
    for again in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mesh = tpm.mesh(devices, tp=2, dp=2)
        assert mesh.axis("tp").all_reduce(np.ones(3)).tolist() == [2.0] * 3
        mesh.close()
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == (mesh.rank == 0 and not again), texts
        assert all("'tp' of a mesh have ranks on several nodes" in t for t in texts)
    _say_spread.cache_clear()
