"""Files made to mislead the reader: one for each way in, each refused by name."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t

from tests.io_samples import SAVE_ID, unique, write
from tparmpi.errors import CheckpointError
from tparmpi.io import format as fmt
from tparmpi.io.index import read_index
from tparmpi.io.planner import Box
from tparmpi.io.reader import BlockReader

SHAPE = (4, 6)
SECRET = unique(SHAPE, np.float32, start=99)


@pytest.fixture
def folder(tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["model/w"] = SECRET
    return write(tmp_path / "a", {"model/w": unique(SHAPE, np.float32)})


def index_of(folder):
    return h5py.File(folder / "index.h5", "r+")


def data_of(folder, writer=1):
    return h5py.File(folder / fmt.data_name(SAVE_ID, writer), "r+")


def replace_tensor(file, pieces, shape=SHAPE, dtype="float32", name="model/w"):
    """Put another virtual dataset in place of a tensor, with the old attributes."""
    crc = file["model/w"].attrs["crc32"]
    del file[name]
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_layout(h5d.VIRTUAL)
    space = h5s.create_simple(shape)
    for path, source, box in pieces:
        target = space.copy()
        target.select_hyperslab(box.offset, (1,) * len(shape), block=box.shape)
        origin = h5s.create_simple(box.shape)
        properties.set_virtual(target, path.encode(), source.encode(), origin)
    fmt.create_dataset(file, name, dtype, space, properties)
    fmt.text_attribute(file[name], "dtype", dtype)
    file[name].attrs.create("crc32", crc, dtype="<u4")


UPPER, LOWER = Box((0, 0), (2, 6)), Box((2, 0), (2, 6))
FILES = [fmt.data_name(SAVE_ID, 0), fmt.data_name(SAVE_ID, 1)]


def soft_link(folder):
    with index_of(folder) as file:
        file["model/v"] = h5py.SoftLink("/model/w")


def external_link(folder):
    with index_of(folder) as file:
        file["model/v"] = h5py.ExternalLink("../secret.h5", "/model/w")


def external_link_as_group(folder):
    with index_of(folder) as file:
        del file["model"]
        file["model"] = h5py.ExternalLink("../secret.h5", "/model")


def group_in_itself(folder):
    with index_of(folder) as file:
        file["model/again"] = file["model"]


def tensor_linked_twice(folder):
    with index_of(folder) as file:
        file["model/v"] = file["model/w"]


def named_type(folder):
    with index_of(folder) as file:
        file["model/v"] = np.dtype("f8")


def name_with_dots(folder):
    with index_of(folder) as file:
        file.move("model/w", "model/.../w")


def plain_dataset(folder):
    with index_of(folder) as file:
        dtype, crc = (file["model/w"].attrs[name] for name in ("dtype", "crc32"))
        del file["model/w"]
        file["model/w"] = SECRET
        fmt.text_attribute(file["model/w"], "dtype", dtype.decode())
        file["model/w"].attrs["crc32"] = crc


def path_upwards(folder):
    with index_of(folder) as file:
        pieces = [("../secret.h5", "model/w", UPPER), (FILES[1], "model/w", LOWER)]
        replace_tensor(file, pieces)


def absolute_path(folder):
    with index_of(folder) as file:
        secret = str(folder.parent / "secret.h5")
        replace_tensor(file, [(secret, "model/w", Box((0, 0), SHAPE))])


def another_saves_file(folder):
    with index_of(folder) as file:
        name = fmt.data_name("f" * 16, 0)
        replace_tensor(file, [(name, "model/w", Box((0, 0), SHAPE))])


def another_dataset(folder):
    with index_of(folder) as file:
        replace_tensor(file, [(FILES[0], "model/v", Box((0, 0), SHAPE))])


def overlapping_pieces(folder):
    with index_of(folder) as file:
        box = Box((1, 0), (3, 6))
        replace_tensor(file, [(FILES[0], "model/w", UPPER), (FILES[1], "model/w", box)])


def gap_between_pieces(folder):
    with index_of(folder) as file:
        replace_tensor(file, [(FILES[0], "model/w", UPPER)])


def vast_shape(folder):
    with index_of(folder) as file:
        shape = (1 << 40, 6)
        pieces = [(FILES[0], "model/w", Box((0, 0), shape))]
        replace_tensor(file, pieces, shape)


def type_beside_its_name(folder):
    with index_of(folder) as file:
        fmt.text_attribute(file["model/w"], "dtype", "int32")


def unknown_type(folder):
    with index_of(folder) as file:
        fmt.text_attribute(file["model/w"], "dtype", "object")


def variable_length_text(folder):
    with index_of(folder) as file:
        file.attrs["extra"] = "{}"


def text_that_is_a_number(folder):
    with index_of(folder) as file:
        file.attrs["save_id"] = 7


def save_id_that_is_a_path(folder):
    with index_of(folder) as file:
        fmt.text_attribute(file, "save_id", "../../etc/passwd")


def extra_that_is_no_object(folder):
    with index_of(folder) as file:
        fmt.text_attribute(file, "extra", "[1]")


def broken_extra(folder):
    with index_of(folder) as file:
        fmt.text_attribute(file, "extra", "{" * 100_000)


def later_version(folder):
    with index_of(folder) as file:
        file.attrs.create("format_version", 2, dtype="<i8")


def another_program(folder):
    with index_of(folder) as file:
        fmt.text_attribute(file, "format", "something else")


def too_few_checksums(folder):
    with index_of(folder) as file:
        del file["model/w"].attrs["crc32"]
        file["model/w"].attrs["crc32"] = np.zeros(1, np.uint32)


def index_is_a_link(folder):
    (folder / "index.h5").rename(folder.parent / "elsewhere.h5")
    os.symlink("../elsewhere.h5", folder / "index.h5")


IN_THE_INDEX = [
    (soft_link, "soft or external link"),
    (external_link, "soft or external link"),
    (external_link_as_group, "soft or external link"),
    (group_in_itself, "linked twice"),
    (tensor_linked_twice, "linked twice"),
    (named_type, "neither a group nor a dataset"),
    (name_with_dots, "not a name that a checkpoint can hold"),
    (plain_dataset, "not a virtual dataset"),
    (path_upwards, "not in a file of its own"),
    (absolute_path, "not in a file of its own"),
    (another_saves_file, "not in a file of its own"),
    (another_dataset, "mapped to a dataset of another name"),
    (overlapping_pieces, "do not fill its shape exactly once"),
    (gap_between_pieces, "do not fill its shape exactly once"),
    (vast_shape, "does not have its 25165824 checksums"),
    (type_beside_its_name, "not stored as its dtype int32"),
    (unknown_type, "unknown dtype 'object'"),
    (variable_length_text, "not a text of fixed length"),
    (text_that_is_a_number, "not a text of fixed length"),
    (save_id_that_is_a_path, "not 16 hexadecimal digits"),
    (extra_that_is_no_object, "extra is missing"),
    (broken_extra, "cannot be read"),
    (later_version, "version 2, this tparmpi reads version 1"),
    (another_program, "not a tparmpi checkpoint"),
    (too_few_checksums, "does not have its 2 checksums"),
    (index_is_a_link, "not a regular file"),
]


@pytest.mark.parametrize(("attack", "words"), IN_THE_INDEX)
def test_a_hostile_index_is_refused(folder, attack, words):
    attack(folder)
    with pytest.raises(CheckpointError, match=rf"index\.h5 .*{words}"):
        read_index(folder)


def put(folder, properties=None, shape=(2, 6), dtype="float32"):
    """Put another dataset in place of the second data file's."""
    with data_of(folder) as file:
        del file["model/w"]
        properties = properties or h5p.create(h5p.DATASET_CREATE)
        space = h5s.create_simple(shape)
        fmt.create_dataset(file, "model/w", dtype, space, properties)


def external_storage(folder):
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_external(str(folder.parent / "secret.h5").encode(), 0, 48)
    put(folder, properties)


def compressed(folder):
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_chunk((1, 6))
    properties.set_deflate(9)
    put(folder, properties)


def never_allocated(folder):
    put(folder)


def compact(folder):
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_layout(h5d.COMPACT)
    put(folder, properties)


def virtual(folder):
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_layout(h5d.VIRTUAL)
    space = h5s.create_simple((2, 6))
    properties.set_virtual(space, b"../secret.h5", b"model/w", space)
    put(folder, properties)


def another_shape(folder):
    put(folder, shape=(2, 1 << 50))


def another_type(folder):
    put(folder, dtype="int32")


def big_endian(folder):
    with data_of(folder) as file:
        del file["model/w"]
        file["model/w"] = unique((2, 6), ">f4")


def variable_length(folder):
    with data_of(folder) as file:
        del file["model/w"]
        space = h5s.create_simple((2, 6))
        h5d.create(file.id, b"model/w", h5t.vlen_create(h5t.IEEE_F32LE), space)


def data_external_link(folder):
    with data_of(folder) as file:
        del file["model/w"]
        file["model/w"] = h5py.ExternalLink("../secret.h5", "/model/w")


def data_external_group(folder):
    with data_of(folder) as file:
        del file["model"]
        file["model"] = h5py.ExternalLink("../secret.h5", "/model")


def data_group(folder):
    with data_of(folder) as file:
        del file["model/w"]
        file.create_group("model/w")


def data_missing_dataset(folder):
    with data_of(folder) as file:
        del file["model/w"]


def data_save_id(folder):
    with data_of(folder) as file:
        fmt.text_attribute(file, "save_id", "f" * 16)


def data_is_a_link(folder):
    path = folder / FILES[1]
    path.rename(folder.parent / "elsewhere.h5")
    os.symlink("../elsewhere.h5", path)


def data_is_a_pipe(folder):
    (folder / FILES[1]).unlink()
    os.mkfifo(folder / FILES[1])


IN_THE_DATA = [
    (external_storage, "stored in another file"),
    (compressed, "other filters than gzip's"),
    (never_allocated, "was it cut"),
    (compact, "neither contiguously nor chunked"),
    (virtual, "neither contiguously nor chunked"),
    (another_shape, "has shape"),
    (another_type, "not stored as float32"),
    (big_endian, "not stored as float32"),
    (variable_length, "not stored as float32"),
    (data_external_link, "soft or external link"),
    (data_external_group, "soft or external link"),
    (data_group, "not a dataset"),
    (data_missing_dataset, "has no 'model/w'"),
    (data_save_id, "belongs to another save"),
    (data_is_a_link, "not a regular file"),
    (data_is_a_pipe, "not a regular file"),
]


@pytest.mark.parametrize(("attack", "words"), IN_THE_DATA)
def test_a_hostile_data_file_is_refused(folder, attack, words):
    attack(folder)
    index = read_index(folder)
    with (
        BlockReader(folder, index) as blocks,
        pytest.raises(CheckpointError, match=rf"-00001\.h5 .*{words}"),
    ):
        blocks.read("model/w", Box((0, 0), SHAPE))
