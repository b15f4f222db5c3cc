"""Every exception carries its facts across a process boundary and says what happened."""

import inspect
import pickle

import pytest

from rl_vllm import errors

# One instance of each public class, with arguments that a message can be checked for.
EXAMPLES = [
    errors.RLVLLMError("two", 2),
    errors.ConfigError("num_replicas must be at least 1, got 0"),
    errors.BadPromptError(3, "it is empty"),
    errors.BadInputError("no entry 'query'"),
    errors.RewardError("row 2 is nan"),
    errors.PrefixMismatchError(2, 1, (2,)),
    errors.MixedVersionsError(3, 5),
    errors.NoProgressError(30.0, "4 groups in flight", "RewardError: nan"),
    errors.OverSamplingError(16, 3, 4, (("with equal rewards", 13),)),
    errors.ServiceNotRunningError("shut down", "generate"),
    errors.ServiceOverloadedError(8, 10, 4),
    errors.ServiceAsleepError("generate()", "call wake_up()"),
    errors.ReplicaIndexError(7, (0, 1)),
    errors.UnknownRequestError("r-7"),
    errors.ReplicaCallError("add_lora()", ((1, "no such folder"),)),
    errors.UnsupportedByEngineError("the engine runs without LoRA"),
    errors.NotEnoughResourcesError({"CPU": 4.0}, {"CPU": 2.0}),
    errors.EngineStartError(1, "no such model"),
    errors.EngineDiedError(1, "exit code -9"),
    errors.NoReplicaServesError(0, "replica 0 is stale"),
    errors.GenerationError(((4, "prompt too long"), (6, "aborted"))),
    errors.DeadlineError("replica 2 to start", 1.5),
    errors.MissingLogprobError(7, 3, "nan", None),
    errors.WeightsMismatchError(("a: missing", "b: float32, wanted bfloat16")),
    errors.AdapterMismatchError(("rank 64 is above 16", "no slot is free")),
    errors.RefitError(7, "commit", (2,), "bucket 14: checksum mismatch"),
    errors.AdapterRefitError(7, "stage", (2,), "no such folder"),
]


def public_errors() -> set[type[errors.RLVLLMError]]:
    members = inspect.getmembers(errors, inspect.isclass)
    return {value for name, value in members if issubclass(value, BaseException) and not name.startswith("_")}


def test_every_public_error_has_an_example_here():
    assert {type(error) for error in EXAMPLES} == public_errors()


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_with_its_attributes_and_message(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert again.args == error.args
    assert str(again) == str(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_keeps_each_argument_under_its_own_name(error):
    names = list(inspect.signature(type(error).__init__).parameters)[1:]
    if names == ["facts"]:
        return
    assert [vars(error)[name] for name in names] == list(error.args)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_is_caught_as_an_error_of_this_package(error):
    with pytest.raises(errors.RLVLLMError):
        raise error


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.BadPromptError, ValueError),
        (errors.BadInputError, ValueError),
        (errors.RewardError, ValueError),
        (errors.PrefixMismatchError, ValueError),
        (errors.NoProgressError, RuntimeError),
        (errors.OverSamplingError, RuntimeError),
        (errors.WeightsMismatchError, ValueError),
        (errors.DeadlineError, TimeoutError),
        (errors.RefitError, RuntimeError),
    ],
)
def test_an_error_is_also_the_builtin_that_a_caller_expects(error, builtin):
    assert issubclass(error, builtin)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.BadPromptError(3, "it is empty"), "prompt 3: it is empty"),
        (errors.DeadlineError("replica 2 to start", 1.5), "gave up after 1.5 s waiting for replica 2 to start"),
        (errors.GenerationError(((4, "too long"), (6, "no"))), "2 prompts failed; first, prompt 4: too long"),
        (
            errors.WeightsMismatchError(("a: missing", "b: float32")),
            "2 tensors do not match the engine's model; nothing was sent:\n  a: missing\n  b: float32",
        ),
        (
            errors.RefitError(7, "commit", (2,), "checksum"),
            "refit to version 7 failed in commit on replicas [2]: checksum "
            "(these replicas serve nothing until a refit completes)",
        ),
        (
            errors.RefitError(7, "stage", (), "disk full"),
            "refit to version 7 failed in stage on the trainer: disk full (every replica still serves the old weights)",
        ),
        (
            errors.RefitError(7, "verify", (1,), "0.5 nats"),
            "refit to version 7 failed in verify on replicas [1]: 0.5 nats "
            "(every replica serves the new weights, which are committed)",
        ),
    ],
)
def test_a_message_says_what_happened_with_values(error, message):
    assert str(error) == message
