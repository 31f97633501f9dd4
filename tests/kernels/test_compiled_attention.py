"""Attention of compiled models: from C++ what a layer makes, the rest by vLLM."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import utils
from vllm.forward_context import override_forward_context
from vllm.utils.torch_utils import LayerName, _encode_layer_name

from tests.attention import test_cpu as backend
from tests.attention.paged_batch import (
    CACHES,
    DTYPES,
    Batch,
    Request,
    chain,
    random_parents,
)
from vllm_specinfer.kernels.cpu import compiled_attention, compiler, extension
from vllm_specinfer.kernels.cpu.cache_write import MOST_ROWS

NAME = "model.layers.0.attn"
TREES = [Request(50, random_parents(8, 14)), Request(33, chain(1), is_tree=False)]
PROMPT = Request(20, chain(40), is_tree=False)


@pytest.fixture(autouse=True, scope="module")
def built():
    assert extension.load() is not None, "these tests are about the C++ kernels"


class Layer:
    """A layer in a batch's pass, and how often vLLM's operators have asked for it."""

    def __init__(self, batch, monkeypatch, **kwargs):
        self.batch, self.impl = batch, backend.make_impl(batch, monkeypatch, **kwargs)
        self.isa, self.kv_cache = batch.isa, batch.raw_cache.clone()
        self._k_scale_float, self._v_scale_float = batch.k_scale, batch.v_scale
        self._k_scale = torch.tensor(batch.k_scale)
        self._v_scale = torch.tensor(batch.v_scale)
        rows, heads = len(batch.query), batch.kv_cache.shape[1]
        torch.manual_seed(1)
        self.key, self.value = torch.randn(2, rows, heads, 64).to(batch.query.dtype)
        tree = batch.tree_rows() if any(r.is_tree for r in batch.requests) else None
        self.context = SimpleNamespace(
            attn_metadata={NAME: backend.build(batch, tree)},
            # K and V that are written are nobody's: any slots will do.
            slot_mapping={NAME: torch.arange(rows).flip(0)},
            no_compile_layers={NAME: self},
        )
        self.asked = {"forward": 0, "do_kv_cache_update": 0}
        for method in self.asked:
            monkeypatch.setattr(self.impl, method, self.counted(method))

    def counted(self, method):
        function = getattr(self.impl, method)

        def call(*args, **kwargs):
            self.asked[method] += 1
            return function(*args, **kwargs)

        return call

    def by_the_layer(self):
        """What the implementation makes of the pass: rows and cache."""
        cache, out = self.kv_cache.clone(), torch.zeros_like(self.batch.query)
        key, value, query = self.key, self.value, self.batch.query
        metadata, slots = (
            of_layers[NAME]
            for of_layers in (self.context.attn_metadata, self.context.slot_mapping)
        )
        impl = type(self.impl)
        impl.do_kv_cache_update(self.impl, self, key, value, cache, slots)
        impl.forward(self.impl, self, query, key, value, cache, metadata, out)
        return out, cache

    def by_operators(self, passes=None):
        """The same by the operators of a compiled model: rows and the layer's cache."""
        passes = passes or compiled_attention.Passes(attend, [NAME], [True] * 4)
        out = torch.zeros_like(self.batch.query)
        with override_forward_context(self.context):
            passes(self.batch.query, self.key, self.value, out)
        return out, self.kv_cache


def attend(query, key, value, out):
    """A compiled model of one layer."""
    compiled_attention._operators()
    operators = torch.ops.vllm_specinfer
    order = operators.unified_kv_cache_update(key, value, NAME)
    operators.unified_attention_with_output(
        query, key, value, out, NAME, kv_cache_dummy_dep=order
    )


def assert_same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", ["auto", *CACHES])
def test_a_pass_of_trees_never_comes_to_python(dtype, cache_dtype, monkeypatch):
    layer = Layer(Batch(TREES, dtype, cache_dtype=cache_dtype), monkeypatch)
    expected = layer.by_the_layer()
    assert not torch.equal(
        expected[1].view(torch.uint8), layer.kv_cache.view(torch.uint8)
    )
    assert_same(layer.by_operators(), expected)
    # Numbers of a byte are vLLM's to round.
    written = int(cache_dtype != "auto")
    assert layer.asked == {"forward": 0, "do_kv_cache_update": written}


@pytest.mark.parametrize(
    "extra",
    [
        {"logits_soft_cap": 0.7},
        {"sinks": torch.linspace(-1, 4, 4).bfloat16()},
        {"sliding_window": 64},
    ],
)
def test_what_a_layer_has_of_its_own(extra, monkeypatch):
    batch = Batch([Request(150, random_parents(8, 14))], torch.bfloat16)
    layer = Layer(batch, monkeypatch, **extra)
    found = layer.by_operators()
    assert_same(found, layer.by_the_layer())
    assert layer.asked["forward"] == 0
    assert not torch.equal(found[0], Layer(batch, monkeypatch).by_operators()[0])


def test_many_rows_are_written_by_vllm(monkeypatch):
    requests = [Request(9, random_parents(MOST_ROWS + 1, 3))]
    layer = Layer(Batch(requests), monkeypatch)
    expected = layer.by_the_layer()
    assert_same(layer.by_operators(), expected)
    assert layer.asked == {"forward": 0, "do_kv_cache_update": 1}


def left_alone(layer, monkeypatch):
    """No metadata, as in a pass that measures memory."""
    layer.context.attn_metadata = None


def of_another_backend(layer, monkeypatch):
    monkeypatch.setattr(compiled_attention, "CPUTreeAttentionImpl", int)


def in_another_layout(layer, monkeypatch):
    layout = SimpleNamespace(is_known=False, in_tiles=False)
    monkeypatch.setattr(compiled_attention, "page_layout", lambda *_: layout)


def with_a_prompt(layer, monkeypatch):
    layer.__init__(Batch([*TREES, PROMPT], unwritten=0), monkeypatch)


def prompts_alone(layer, monkeypatch):
    layer.__init__(Batch([PROMPT], unwritten=0), monkeypatch)


@pytest.mark.parametrize(
    "case",
    [
        left_alone,
        of_another_backend,
        in_another_layout,
        with_a_prompt,
        prompts_alone,
    ],
)
def test_other_passes_are_vllms(case, monkeypatch):
    layer = Layer(Batch(TREES), monkeypatch)
    case(layer, monkeypatch)
    counted, passes = layer.impl.forward, []

    def forward(*args, output, **kwargs):
        passes.append(metadata := args[5])
        return counted(*args, output=output, **kwargs) if metadata else output

    monkeypatch.setattr(layer.impl, "forward", forward)
    expected = layer.by_the_layer() if layer.context.attn_metadata else None
    found = layer.by_operators()
    assert len(passes) == layer.asked["do_kv_cache_update"] == 1
    if expected:
        assert_same(found, expected)


def test_a_new_cache_is_the_layers(monkeypatch):
    layer = Layer(Batch(TREES), monkeypatch)
    passes = compiled_attention.Passes(attend, [NAME], [True] * 4)
    expected = layer.by_the_layer()
    first = layer.by_operators(passes)
    before = first[1].clone()
    layer.kv_cache = layer.batch.raw_cache.clone()
    assert_same(layer.by_operators(passes), expected)
    assert_same([first[1]], [before])


def test_new_weights_bring_other_scales_and_sinks(monkeypatch):
    sinks = torch.linspace(-1, 4, 4).bfloat16()
    batch = Batch(TREES, torch.bfloat16)
    layer = Layer(batch, monkeypatch, sinks=sinks)
    passes = compiled_attention.Passes(attend, [NAME], [True] * 4)
    before = layer.by_operators(passes)[0]
    layer._k_scale_float, layer._v_scale_float = 2 * batch.k_scale, 3 * batch.v_scale
    other_scales = layer.by_operators(passes)[0]
    assert_same([other_scales], layer.by_the_layer()[:1])
    sinks += 1
    other_sinks = layer.by_operators(passes)[0]
    assert_same([other_sinks], layer.by_the_layer()[:1])
    assert not torch.equal(before, other_scales)
    assert not torch.equal(other_scales, other_sinks)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, KeyError])
def test_what_vllms_operators_raise_is_raised(error, monkeypatch):
    """What has been compiled, as a signal ends it within a prompt."""

    def model(query, key, value, out):
        name = _encode_layer_name(NAME)
        torch.ops.vllm.unified_attention_with_output(query, key, value, out, name)
        return out * 2

    def fail(*_args, **_kwargs):
        raise error("in the middle of a prompt")

    layer = Layer(Batch([PROMPT], unwritten=0), monkeypatch)
    out = torch.zeros_like(layer.batch.query)
    inputs = layer.batch.query, layer.key, layer.value, out
    compiled = torch.compile(model, backend=compiler.compile_graph, fullgraph=True)
    with torch.inference_mode(), override_forward_context(layer.context):
        expected, code = utils.run_and_get_code(compiled, *inputs)
        assert "CppWrapperCodeCache" in "".join(code) and expected.any()
        with monkeypatch.context() as failing:
            failing.setattr(layer.impl, "forward", fail)
            with pytest.raises(error, match="in the middle"):
                compiled(*inputs)
        assert torch.equal(compiled(*inputs), expected)


def test_a_pass_keeps_nothing(monkeypatch):
    """An engine that has gone gives its memory back."""
    layer = Layer(Batch(TREES), monkeypatch)
    passes = compiled_attention.Passes(attend, [NAME], [True] * 4)
    layer.by_operators(passes)
    kept = weakref.ref(layer.kv_cache), weakref.ref(layer.context.slot_mapping[NAME])
    layer.kv_cache = layer.context = None
    assert [reference() for reference in kept] == [None, None]


def test_layers_have_the_rows_of_their_own_group(monkeypatch):
    """As layers with and without a sliding window have, whose blocks are others."""
    ours, other = (Layer(Batch(TREES, seed=i), monkeypatch) for i in (0, 1))
    for of_layers in ("attn_metadata", "slot_mapping", "no_compile_layers"):
        getattr(ours.context, of_layers)["other"] = getattr(other.context, of_layers)[
            NAME
        ]
    passes = compiled_attention.Passes(attend, ["other", NAME], [True] * 4)
    expected = ours.by_the_layer()
    assert_same(ours.by_operators(passes), expected)
    assert_same([other.kv_cache], [other.batch.raw_cache])


def test_nothing_stays_of_a_pass(monkeypatch):
    layer = Layer(Batch(TREES), monkeypatch)

    def fail(*_args):
        raise KeyError("a pass that fails")

    for model in (attend, fail):
        passes = compiled_attention.Passes(model, [NAME], [True] * 4)
        try:
            layer.by_operators(passes)
        except KeyError:
            assert model is fail
        assert layer.asked["forward"] == 0
    out = torch.zeros_like(layer.batch.query)
    with override_forward_context(layer.context):
        attend(layer.batch.query, layer.key, layer.value, out)
    assert layer.asked["forward"] == layer.asked["do_kv_cache_update"] == 1


def graph_of(*names):
    """A model's graph whose layers have these names, and its inputs."""
    graph = torch.fx.Graph()
    query = graph.placeholder("query")
    objects = [name for name in names if isinstance(name, LayerName)]
    given = {name: graph.placeholder(f"name{i}") for i, name in enumerate(objects)}
    for name in names:
        name = given.get(name, name)
        order = graph.call_function(
            torch.ops.vllm.unified_kv_cache_update, (query, query, name)
        )
        out = graph.call_function(torch.empty_like, (query,))
        graph.call_function(
            torch.ops.vllm.unified_attention_with_output.default,
            (query, query, query, out, name),
            {"kv_cache_dummy_dep": order},
        )
    graph.output(out)
    return torch.fx.GraphModule({}, graph), [torch.ones(2, 2, 64), *objects]


@pytest.mark.parametrize("kind", [str, LayerName])
def test_a_graph_has_our_operators_and_no_objects(kind):
    graph, inputs = graph_of(kind("a"), kind("b"))
    found, kept = compiled_attention.use_operators(graph, inputs)
    assert found == ["a", "b"]
    assert kept == [True] + [False] * (len(inputs) - 1)
    targets = [str(n.target) for n in graph.graph.nodes if "unified" in str(n.target)]
    assert len(targets) == 4 and all(t.startswith("vllm_specinfer.") for t in targets)
    assert [n.target for n in graph.graph.nodes if n.op == "placeholder"] == ["query"]


@pytest.mark.parametrize("reason", ["no C++ kernels", "other arguments"])
def test_a_graph_that_cannot_have_them_keeps_vllms(reason, monkeypatch):
    if reason == "no C++ kernels":
        monkeypatch.setattr(extension, "load", lambda: None)
    else:
        known = {"unified_kv_cache_update": ["key", "value", "name"]}
        monkeypatch.setattr(compiled_attention, "_ARGUMENTS", known)
    operators = compiled_attention._operators.__wrapped__()
    assert operators == {}
    monkeypatch.setattr(compiled_attention, "_operators", lambda: operators)
    graph, inputs = graph_of(LayerName("a"))
    before = graph.code
    assert compiled_attention.use_operators(graph, inputs) == ([], [True, True])
    assert graph.code == before
