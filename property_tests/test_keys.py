"""Laws of the keys of tensors: their text in manifests is read back, and no two have the same."""

from hypothesis import assume, given
from hypothesis import strategies as st

from fxtrain.state import Key
from fxtrain.state.keys import EXTRA, RANDOM, decode_key, encode_key

text = st.text(max_size=8) | st.sampled_from(["0.weight", ".", "/", "a/b", "module", EXTRA])
kinds = st.text(max_size=6).filter(lambda kind: "." not in kind) | st.sampled_from(["grad", EXTRA])
keys = st.builds(Key, kinds, text)
# Of a model's tensor; a save refuses other names of models.
models = st.text(min_size=1, max_size=6) | st.sampled_from(["model", "a.b", EXTRA, f"{RANDOM}1"])
models = models.filter(lambda name: decode_key(encode_key(name, Key("module")))[0] == name)
named = st.tuples(models, keys) | st.tuples(
    st.just(""), st.builds(Key, st.sampled_from([EXTRA, RANDOM]), text)
)


@given(keys)
def test_a_key_is_read_from_its_text(key):
    assert Key.read(str(key)) == key


@given(named)
def test_a_name_is_decoded_as_it_was_encoded(one):
    assert decode_key(encode_key(*one)) == one


@given(named, named)
def test_different_keys_have_different_names(one, other):
    assume(one != other)
    assert encode_key(*one) != encode_key(*other)


@given(st.text(max_size=20))
def test_any_text_is_decoded(name):
    """As manifests that somebody has changed may have."""
    model, key = decode_key(name)
    assert name.startswith(model) and key.name in name


@given(kinds, st.lists(st.text(max_size=5), max_size=3))
def test_several_names_are_those_of_one_path(kind, names):
    assert Key.of(kind, *names) == Key(kind, ".".join(names))
