"""Files of tokens, damaged at random: read, or one DataError that names a file."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.errors import DataError
from tests._damage import damaged, misshapen, only, replaced
from tests._slow import slow_after
from tests.data._loaders import world
from tests.data._token_files import write_megatron, write_nanogpt
from tests.data.test_token_folders import DOCUMENTS, WRITERS

FORMATS = {**WRITERS, "megatron": write_megatron, "nanogpt": write_nanogpt}


def _read(source):
    for how in (
        {"documents": True},
        {"packing": fx.data.BestFit(window_rows=2)},
        *([{"compatible": "megatron"}] if isinstance(source, fx.data.MegatronTokens) else []),
    ):
        for batch in fx.tokens(source, world(1)[0], length=4, batch_size=3, **how):
            assert batch.data["tokens"].shape[1] == 4


@pytest.mark.parametrize("name", slow_after(3, FORMATS))
@settings(max_examples=30)
@given(data=st.data())
def test_a_damaged_file_of_tokens_is_read_or_refused(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("tokens")
    source = FORMATS[name](folder, DOCUMENTS)
    file = data.draw(st.sampled_from(sorted(folder.iterdir())), label="file")
    with replaced(file, lambda whole: data.draw(damaged(whole))):
        only(DataError, _read, source)


@settings(max_examples=60)
@given(data=st.data())
def test_an_index_of_shards_with_wrong_values_is_read_or_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("tokens")
    source = WRITERS["mds ndarray"](folder, DOCUMENTS)
    index = folder / "index.json"
    wrong = data.draw(misshapen(json.loads(index.read_text())))
    index.write_text(json.dumps(wrong, default=str))
    only(DataError, _read, source)


@example("[" * 200_000)
@given(st.sampled_from(["{", "null", "[]", '{"vocabulary_size": []}', '{"vocabulary_size": 1}']))
def test_a_description_that_is_none_is_left_alone(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("tokens")
    source = write_nanogpt(folder, DOCUMENTS, name="a.bin")
    (folder / "a.json").write_text(text)
    _read(source)
