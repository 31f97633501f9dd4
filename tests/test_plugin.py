"""The plugin is inert until the method is specinfer, then fails closed."""

import ast
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import vllm_alone
from vllm_specinfer import compat, flags, plugin
from vllm_specinfer.hooks import compile_cache

# Prints every config of a list of engine arguments, one line each.
DUMP = """
import os, re, sys
from vllm import EngineArgs
import vllm.config.vllm as vllm_config
for kwargs in eval(sys.argv[1]):
    env, flag = dict(os.environ), vllm_config.HAS_TRITON
    config = EngineArgs(skip_tokenizer_init=True, **kwargs).create_engine_config()
    changed = {k for k in os.environ if os.environ[k] != env.get(k)}
    assert "VLLM_USE_V2_MODEL_RUNNER" not in changed, changed
    assert vllm_config.HAS_TRITON == flag
    parts = (config, config.speculative_config, config.parallel_config)
    text = " ".join(map(repr, (*parts, config.scheduler_config)))
    # Ports and ids differ between any two processes.
    varying = r"(instance_id|\\w*ports?\\w*)=(\\[.*?\\]|[^,)]+)"
    print("CONFIG", re.sub(varying, "", text))
hook = EngineArgs.create_speculative_config
print("HOOK", hasattr(hook, "_specinfer_original"))
"""


PLAIN = """
import sys
from vllm import EngineArgs
plain = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True)
print(plain.create_engine_config().use_v2_model_runner)
"""


def run(code, *argv, **env):
    return vllm_alone.run(code, *argv, VLLM_CPU_KVCACHE_SPACE="1", **env)


def test_importing_the_package_imports_neither_torch_nor_vllm():
    code = (
        "import sys, vllm_specinfer, vllm_specinfer.plugin, vllm_specinfer.options\n"
        "assert not {'torch', 'vllm', 'pydantic'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_methods_get_the_config_they_get_without_the_plugin(make_llama):
    target = make_llama("target")
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    chain = {"model": make_llama("ssm"), "num_speculative_tokens": 3}
    kwargs = repr(
        [
            {"model": target},
            {"model": target, "speculative_config": ngram},
            {"model": target, "speculative_config": chain | {"method": "draft_model"}},
        ]
    )
    loaded = run(DUMP, kwargs, VLLM_PLUGINS="specinfer")
    absent = run(DUMP, kwargs, VLLM_PLUGINS="")
    assert "HOOK True" in loaded and "HOOK False" in absent

    def configs(output):
        return [line for line in output.splitlines() if line.startswith("CONFIG")]

    assert len(configs(loaded)) == 3
    assert configs(loaded) == configs(absent)


def test_what_vllm_refuses_beside_other_methods_it_still_refuses():
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    plugin.register()
    for params in (SamplingParams(min_p=0.1), SamplingParams(logit_bias={1: 2.0})):
        with pytest.raises(VLLMValidationError, match="not yet supported"):
            params._validate_spec_decode(SimpleNamespace(method="ngram"))
        params._validate_spec_decode(SimpleNamespace(verifies_with_plain_sampler=True))


def test_the_kill_switch_leaves_vllms_own_error(make_llama):
    code = (
        "import sys\n"
        "from vllm import EngineArgs\n"
        "try:\n"
        "    EngineArgs(model=sys.argv[1], skip_tokenizer_init=True,\n"
        "               speculative_config={'method': 'specinfer', 'model': 'm'}\n"
        "               ).create_engine_config()\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "assert 'vllm_specinfer.hooks.speculative_config' not in sys.modules\n"
    )
    output = run(code, make_llama(), VLLM_SPECINFER_DISABLE="1")
    assert "SpeculativeConfig\nmethod" in output and "Input should be" in output


def test_registering_twice_wraps_once():
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    once = EngineArgs.create_speculative_config
    plugin.register()
    assert EngineArgs.create_speculative_config is once
    assert once.__name__ == "create_speculative_config"
    assert not hasattr(once._specinfer_original, "_specinfer_original")


@pytest.fixture
def arguments(make_llama, v2_undone):
    from vllm import EngineArgs

    def make(spec=None, **kwargs):
        spec = {"method": "specinfer", "model": make_llama("ssm")} | (spec or {})
        spec = {key: value for key, value in spec.items() if value is not None}
        return EngineArgs(
            model=make_llama("target"),
            skip_tokenizer_init=True,
            speculative_config=spec or None,
            **kwargs,
        )

    return make


def test_flags_are_merged_into_the_dictionary(arguments, make_llama):
    args = arguments({"model": None}, spec_model=make_llama("other"), spec_tokens=5)
    config = args.create_engine_config().speculative_config
    assert config.num_speculative_tokens == 5
    assert config.model.endswith("other")


def test_flags_alone_are_enough(arguments, make_llama):
    args = arguments(
        {"method": None, "model": None},
        spec_method="specinfer",
        spec_model=make_llama("other"),
    )
    assert args.create_engine_config().speculative_config.num_speculative_tokens == 8


def test_a_flag_and_its_key_together_are_refused(arguments):
    args = arguments({"num_speculative_tokens": 4}, spec_tokens=5)
    with pytest.raises(ValueError, match="--spec-tokens and .* must not both be given"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"scheduler_cls": "my.Scheduler"}, "scheduler_cls must be left out"),
        ({"worker_cls": "my.Worker"}, "worker_cls must be left out"),
    ],
)
def test_the_users_own_classes_are_refused(arguments, kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        arguments(**kwargs).create_engine_config()


def test_a_refusal_changes_nothing(arguments):
    import vllm.config.vllm

    args = arguments({"tree": []})
    flag = vllm.config.vllm.HAS_TRITON
    with pytest.raises(ValueError):
        args.create_engine_config()
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    assert args.scheduler_cls is None
    assert flag == vllm.config.vllm.HAS_TRITON


@pytest.mark.parametrize("processes", [True, False])
def test_the_next_engine_without_specinfer_gets_its_own_runner_back(
    processes, arguments, monkeypatch
):
    import vllm.config.vllm
    from vllm import EngineArgs, envs

    for name in compile_cache.AOT_ENV, compile_cache.FOLDER_ENV:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(processes)))
    flag = vllm.config.vllm.HAS_TRITON
    args = arguments()
    assert args.create_engine_config().use_v2_model_runner
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert os.environ[compile_cache.AOT_ENV] == "0"
    # In a process that is started meanwhile, too.
    assert run(PLAIN, args.model, VLLM_PLUGINS="specinfer").endswith("False\n")
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    envs.enable_envs_cache()  # as an engine does where it runs
    plain = EngineArgs(model=args.model, skip_tokenizer_init=True)
    assert not plain.create_engine_config().use_v2_model_runner
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    assert flag == vllm.config.vllm.HAS_TRITON
    # Models of this process may still be compiled so.
    for name in compile_cache.AOT_ENV, compile_cache.FOLDER_ENV:
        assert (name in os.environ) == (not processes)


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.0.0", "dev", "0.320.0"])
def test_an_unknown_vllm_is_refused_by_version(version, monkeypatch, arguments):
    import vllm

    args = arguments()
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(ValueError) as error:
        args.create_engine_config()
    assert str(error.value) == (
        "vLLM must be 0.32.x or 0.33.x for method specinfer, or "
        f"VLLM_SPECINFER_ANY_VLLM=1 must be set to try another one; got {version}"
    )
    monkeypatch.setenv("VLLM_SPECINFER_ANY_VLLM", "1")
    assert args.create_engine_config().use_v2_model_runner


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.0rc1"])
def test_known_versions_are_accepted(version, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    assert compat.unsupported_reason() is None


@pytest.mark.parametrize(
    "missing", ["vllm.no_such_module:X", "vllm.config:ModelConfig.no_such_attribute"]
)
def test_a_missing_vllm_name_is_refused_by_name(missing):
    assert missing.replace(":", ".") in compat.unsupported_reason((missing,))


@pytest.mark.parametrize("names", [flags.SWITCHES[:2], flags.SWITCHES[2:]])
def test_vllm_knows_the_switches_that_are_set(monkeypatch, names):
    code = (
        "from vllm_specinfer import plugin; plugin.register()\n"
        "from vllm import envs\n"
        "print([n for n in envs.environment_variables if 'SPECINFER' in n])\n"
        "from vllm.platforms import current_platform\n"
        "current_platform.validate_environ(True)"
    )
    for name in os.environ:
        if "SPECINFER" in name:
            monkeypatch.delenv(name)
    known = run(code, **dict.fromkeys(names, "1")).splitlines()[-1]
    assert sorted(ast.literal_eval(known)) == sorted(names)


def test_the_wrapper_leaves_other_arguments_objects_alone():
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    args = SimpleNamespace(
        speculative_config=None, spec_method=None, spec_model=None, spec_tokens=None
    )
    assert EngineArgs.create_speculative_config(args, None, None) is None
