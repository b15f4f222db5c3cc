"""The recipe runs, resumes, and refuses bad input with one sentence."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpo_sync
import numpy as np
import pytest
import torch
from config import GRPOConfig, build_config, parse_command
from evaluate import compare
from losses import MeasuredGRPOLoss
from reporting import RunReport, load_checkpoint
from torchrl.modules.llm import TransformersWrapper
from trainer import ResponseTrainer
from transformers import AutoModelForCausalLM

from rl_vllm.errors import ConfigError, EngineStartError
from rl_vllm.policy import VLLMPolicy
from rl_vllm.testing import FakeService
from rl_vllm.testing.fake_service import FAKE_MODEL
from rl_vllm.testing.models import tiny_tokenizer

RECIPE = Path(grpo_sync.__file__).parent

# A random model hits a digit now and then, so that some groups have rewards to learn from. The learning rate is large:
# weights that were not sent show in the logprobs at once.
SMALL = [
    "--config", "quickstart", "--set", "task=count_bits", "--set", "task_options={min_n: 1, max_n: 60}",
    "--set", "num_train=16", "--set", "num_held_out=4", "--set", "eval_samples=2", "--set", "num_examples=1",
    "--set", "max_response_tokens=24", "--set", "learning_rate=1e-3", "--set", "engine_cores=1",
]  # fmt: skip


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(RECIPE / "grpo_sync.py"), *arguments],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tiny_llama, tmp_path_factory):
    output = tmp_path_factory.mktemp("grpo") / "run"
    done = run(*SMALL, "--model", str(tiny_llama), "--steps", "2", "--output", str(output))
    assert done.returncode == 0, done.stderr
    return output, done


@pytest.mark.engine
def test_a_run_writes_all_it_promises(trained):
    output, done = trained
    summary = json.loads((output / "summary.json").read_text())
    assert set(summary) == {
        "steps", "reward_before", "reward_after", "difference_ci95", "seconds_setup", "seconds_train",
        "logprob_mismatch_mean", "refits",
    }  # fmt: skip
    assert (summary["steps"], summary["refits"], summary["seconds_setup"]) == (2, 3, None)
    low, high = summary["difference_ci95"]
    assert low <= summary["reward_after"] - summary["reward_before"] <= high
    assert "mean reward on held-out prompts" in done.stdout + done.stderr
    steps = lines(output / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert [step["weight_version"] for step in steps] == [2, 3]
    rollouts = lines(output / "rollouts.jsonl")
    # Step 1 is sampled by version 1, the refit that comes before any rollout.
    assert [line["version"] for line in rollouts] == [1] * 32 + [2] * 32
    assert [line["oldest_version"] for line in rollouts] == [1] * 32 + [2] * 32
    for step in steps:
        mine = [line["reward"] for line in rollouts if line["step"] == step["step"]]
        assert step["reward"] == pytest.approx(sum(mine) / 32)
    assert (output / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list((output / "tensorboard").glob("events.*"))


@pytest.mark.engine
def test_trainer_and_engine_agree_on_every_token_trained_on(trained):
    output, _ = trained
    measured = [step["logprob_mismatch_max"] for step in lines(output / "metrics.jsonl")]
    measured = [value for value in measured if value is not None]
    assert measured
    assert max(measured) < 1e-4
    assert json.loads((output / "summary.json").read_text())["logprob_mismatch_mean"] < 1e-4


@pytest.mark.engine
def test_a_resumed_run_goes_on_with_the_trained_weights_and_the_next_prompts(trained, tmp_path):
    first, _ = trained
    output = tmp_path / "resumed"
    shutil.copytree(first, output)
    done = run("--resume", str(output), "--steps", "4")
    assert done.returncode == 0, done.stderr
    steps = lines(output / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[:2] == lines(first / "metrics.jsonl")
    measured = [step["logprob_mismatch_max"] for step in steps[2:] if step["logprob_mismatch_max"] is not None]
    assert measured
    assert max(measured) < 1e-4
    # Sixteen prompts in steps of four: the four steps of the first pass share none.
    rollouts = lines(output / "rollouts.jsonl")
    asked = [{line["prompt"] for line in rollouts if line["step"] == step} for step in (1, 2, 3)]
    assert not asked[2] & (asked[0] | asked[1])
    before, after = (json.loads((folder / "summary.json").read_text()) for folder in (first, output))
    assert after["reward_before"] == before["reward_before"]
    assert load_checkpoint(output)["step"] == 4


@pytest.mark.engine
def test_a_finished_run_is_not_resumed_without_more_steps(trained, main):
    output, _ = trained
    assert main("--resume", str(output))[:2] == (
        1, f"error: the run in {output} has 2 steps already: ask for more with --steps",
    )  # fmt: skip


@pytest.mark.engine
def test_a_failure_while_engines_run_is_one_sentence_and_stops_them(tiny_llama, tmp_path):
    arguments = [*SMALL, "--set", "max_model_len=16", "--model", str(tiny_llama), "--output", str(tmp_path / "run")]
    done = run(*arguments)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: prompt 0: ")
    assert "16" in last


@pytest.mark.engine
def test_sigterm_stops_the_run_and_its_engines(tiny_llama, tmp_path):
    output = tmp_path / "run"
    arguments = [*SMALL, "--model", str(tiny_llama), "--steps", "100000", "--output", str(output)]
    command = [sys.executable, str(RECIPE / "grpo_sync.py"), *arguments]
    with (tmp_path / "stderr").open("w+") as stderr, subprocess.Popen(command, stderr=stderr) as program:
        while program.poll() is None and not (output / "metrics.jsonl").is_file():
            time.sleep(0.1)
        while program.poll() is None and not lines(output / "metrics.jsonl"):
            time.sleep(0.1)
        program.terminate()
        assert program.wait(timeout=60) == 128 + signal.SIGTERM
        stderr.seek(0)
        assert "Traceback" not in stderr.read()
    # That no engine is left is checked at the end of the session.


@pytest.fixture
def main(capsys):
    """The program in this process; returns its exit code and the last line it wrote to stderr."""
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments):
        code = grpo_sync.main(arguments)
        written = capsys.readouterr().err.strip().splitlines()
        return code, written[-1], len(written)

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--config", "quikstart"], "there is no config 'quikstart'"),
        (["--set", "learning_rat=1"], "unknown setting 'learning_rat': did you mean 'learning_rate'?"),
        (["--set", "learning_rate=fast"], "learning_rate must be float, got 'fast'"),
        (["--set", "steps=2.5"], "steps must be int, got 2.5"),
        (["--set", "steps"], "--set takes KEY=VALUE, got 'steps'"),
        (["--set", "group_size=1"], "group_size must be an integer of at least 2, got 1"),
        (["--set", "num_train=2"], "prompts_per_step=4 is above num_train=2"),
        (["--set", "task_options={"], "--set task_options is not YAML"),
        (["--set", "task=needle"], "reasoning-gym has no task 'needle'"),
        (["--set", "num_train=0", "--set", "prompts_per_step=1"], "num_train"),
        (["--set", "task=count_bits", "--set", "task_options={max_n: 3}"], "too few different prompts"),
        (["--model", "/nowhere/at/all"], "model folder '/nowhere/at/all' does not exist"),
        (["--set", "num_replicas=0"], "num_replicas must be an integer of at least 1, got 0"),
        (["--set", "engine_cores=0"], "engine_cores must be an integer of at least 1, got 0"),
        (["--set", "engine_kv_cache_gib=0"], "engine_kv_cache_gib must be a finite number above 0, got 0.0"),
        (["--set", "engine_dtype=int8"], "engine_dtype must be one of auto, float32, bfloat16, float16, got 'int8'"),
        (["--set", "max_model_len=1"], "max_model_len must be an integer of at least 2, got 1"),
        (["--set", "temperature=3"], "temperature"),
        (["--set", "weight_decay=-1"], "weight_decay must be a finite number of at least 0, got -1.0"),
        (["--set", "trainer_device=cpuu"], "trainer_device must be a device like 'cpu' or 'cuda:0', got 'cpuu'"),
        (["--set", "num_held_out=0"], "num_held_out must be an integer of at least 1, got 0"),
        (["--resume", "/nowhere/at/all"], "there is nothing to resume in '/nowhere/at/all': there is no such folder"),
    ],
)
def test_bad_input_is_refused_with_one_sentence(main, tmp_path, arguments, complaint):
    output = [] if "--resume" in arguments else ["--output", str(tmp_path / "run")]
    code, message, num_lines = main(*arguments, *output)
    assert code == 1
    assert message.startswith("error: ")
    assert complaint in message
    assert num_lines == 1
    assert not (tmp_path / "run").exists()


@pytest.fixture
def finished(tmp_path, tiny_llama):
    """The output folder of a run of two steps, written without a run, and a way to see that nothing in it changed."""
    folder = tmp_path / "finished"
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "events.out.tfevents.1").write_bytes(b"events")
    values = {"output": str(folder), "model": str(tiny_llama), "task": "count_bits", "num_train": 16, "num_examples": 0}
    (folder / "config.json").write_text(json.dumps(values))
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (folder / name).write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.25}\n')
    saved = {"step": 2, "model": {}, "optimizer": {}, "rng": torch.get_rng_state(), "reward_before_P": [0.5]}
    torch.save(saved, folder / "checkpoint.pt")
    return folder


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("way", ["--output", "--resume"])
def test_a_run_whose_engines_do_not_start_leaves_the_folder_as_it_was(main, finished, tiny_llama, monkeypatch, way):
    def refuse(*_arguments):
        raise EngineStartError(0, "no memory")

    monkeypatch.setattr(grpo_sync.AsyncVLLM, "launch", refuse)
    before = contents(finished)
    more = [*SMALL, "--model", str(tiny_llama)] if way == "--output" else ["--set", "num_replicas=2"]
    code, message, _ = main(way, str(finished), *more)
    assert (code, message) == (1, "error: replica 0 did not start: no memory")
    assert contents(finished) == before


@pytest.mark.parametrize("way", ["--output", "--resume"])
def test_a_setting_that_is_refused_leaves_the_folder_as_it_was(main, finished, way):
    before = contents(finished)
    code, message, _ = main(way, str(finished), "--set", "num_replicas=0")
    assert (code, message) == (1, "error: num_replicas must be an integer of at least 1, got 0")
    assert contents(finished) == before


def test_a_folder_without_a_checkpoint_has_nothing_to_resume(main, tmp_path):
    code, message, num_lines = main("--resume", str(tmp_path))
    assert (code, num_lines) == (1, 1)
    assert message.startswith(f"error: there is nothing to resume in '{tmp_path}': it has no checkpoint.pt")


@pytest.mark.parametrize("damage", [lambda raw: raw[: len(raw) // 2], lambda raw: b"garbage", lambda raw: b""])
def test_a_damaged_checkpoint_is_called_damaged(main, finished, damage):
    path = finished / "checkpoint.pt"
    path.write_bytes(damage(path.read_bytes()))
    code, message, num_lines = main("--resume", str(finished))
    assert (code, num_lines) == (1, 1)
    assert message == f"error: the checkpoint {path} is damaged: start again without --resume"


@pytest.mark.parametrize("torn", ["", '{"step": 3, "rew', '{"step": 3, "rew\n', '{"step": 3, "reward": 0.0}'])
def test_a_resumed_report_keeps_the_whole_lines_up_to_its_checkpoint(finished, torn):
    with (finished / "metrics.jsonl").open("a") as file:
        file.write(torn)
    with RunReport(build_config({"output": str(finished)}), first_step=2) as report:
        assert [line["step"] for line in report.read_metrics()] == [1, 2]
        report.metrics(3, {"reward": 1.0, "logprob_mismatch": None, "seconds_refit": 0.1})
        assert [line["step"] for line in report.read_metrics()] == [1, 2, 3]


def test_a_fresh_report_clears_the_lines_of_the_run_before(finished):
    with RunReport(build_config({"output": str(finished)}), first_step=0) as report:
        assert report.read_metrics() == []
    assert (finished / "rollouts.jsonl").read_text() == ""
    assert not (finished / "tensorboard" / "events.out.tfevents.1").exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    main, tmp_path, tiny_llama, monkeypatch
):
    monkeypatch.setattr(grpo_sync, "load_model", lambda *_arguments: pytest.fail("the model was loaded"))
    (tmp_path / "file").write_text("not a folder")
    output = tmp_path / "file" / "run"
    code, message, num_lines = main(*SMALL, "--model", str(tiny_llama), "--output", str(output))
    assert (code, num_lines) == (1, 1)
    assert message == f"error: cannot write to output='{output}' (Not a directory): name another folder"


@pytest.mark.parametrize("writable", [True, False])
def test_an_unforeseen_failure_is_one_sentence_that_names_its_own_traceback(main, tmp_path, monkeypatch, writable):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path if writable else tmp_path / "missing"))
    monkeypatch.setattr(grpo_sync, "train", lambda _command: 1 / 0)
    messages = [main("--config", "quickstart") for _ in range(2)]
    for code, message, num_lines in messages:
        assert (code, num_lines) == (1, 1)
        assert message.startswith("error: ZeroDivisionError: division by zero (")
    files = list(tmp_path.glob("grpo_sync_*.txt"))
    if writable:
        assert len(files) == 2
        assert {message.rpartition(" ")[2].rstrip(")") for _, message, _ in messages} == {str(file) for file in files}
        assert all("Traceback" in file.read_text() for file in files)
    else:
        assert "the traceback could not be written" in messages[0][1]


def test_the_program_itself_exits_with_1_and_no_traceback(tmp_path):
    done = run("--model", str(tmp_path / "missing"), "--output", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "does not exist" in done.stderr.strip().splitlines()[-1]


def test_every_config_file_holds_settings_that_pass():
    names = sorted(path.stem for path in (RECIPE / "configs").glob("*.yaml"))
    assert "quickstart" in names
    for name in names:
        assert isinstance(parse_command(["--config", name]).config, GRPOConfig)


def test_the_command_line_wins_over_the_file_and_numbers_are_read_as_numbers(monkeypatch):
    monkeypatch.setenv("RL_VLLM_SETUP_SECONDS", "312")
    config = parse_command(["--set", "learning_rate=1e-4", "--set", "steps=7", "--steps", "9"]).config
    assert (config.learning_rate, config.steps, config.setup_seconds) == (1e-4, 9, 312.0)


def test_a_config_needs_an_output_folder():
    with pytest.raises(ConfigError, match="output is not set"):
        build_config({"steps": 3})


def test_equal_differences_have_an_interval_of_no_width():
    before = np.array([0.0, 0.25, 0.5])
    difference = compare(before, before + 0.25)
    assert (difference.before, difference.after) == (0.25, 0.5)
    assert (difference.low, difference.high) == pytest.approx((0.25, 0.25))


def test_the_interval_is_that_of_the_normal_approximation_for_many_prompts():
    # 1000 prompts, half of them up by one: standard error sqrt(0.25 / 1000), and 1.96 of them to each side.
    before = np.zeros(1000)
    difference = compare(before, np.repeat([0.0, 1.0], 500))
    half = 1.96 * np.sqrt(0.25 / 1000)
    assert (difference.low, difference.high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.002)


def test_the_trainer_that_skips_prompt_logits_has_torchrls_loss_and_gradient(tiny_llama):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    tokenizer = tiny_tokenizer()
    policy = VLLMPolicy(FakeService(info=FAKE_MODEL), pad_output=False, tokenizer=tokenizer)
    batch = policy(_token_prompts([[5, 6, 7, 8, 9, 10], [7, 8], [11]]))
    batch["advantage"] = torch.tensor([1.0, -0.5, 2.0]).reshape(3, 1, 1)
    found = {}
    for kind in (TransformersWrapper, ResponseTrainer):
        wrapper = kind(
            model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=False, pad_model_input=True
        )
        loss_fn = MeasuredGRPOLoss(wrapper, masking_strategy="rlhf", entropy_bonus=False)
        model.zero_grad()
        loss = loss_fn(batch).loss_objective.sum()
        loss.backward()
        gradient = model.model.layers[0].mlp.up_proj.weight.grad.clone()
        found[kind] = loss.detach(), loss_fn.log_ratio, gradient
    assert found[ResponseTrainer][2].abs().max() > 1e-4
    torch.testing.assert_close(found[ResponseTrainer], found[TransformersWrapper], rtol=1e-4, atol=1e-5)
    # The log-ratios are of the sampled tokens, all of them and nothing else.
    lengths = batch["completion", "response_length"]
    assert (found[ResponseTrainer][1] != 0).sum(1).tolist() == lengths.tolist()


def _token_prompts(rows):
    from tensordict import TensorDict, lazy_stack
    from torchrl.modules.llm.policies import Tokens

    return lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in rows])
