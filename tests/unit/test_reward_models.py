"""Reward models: a small classifier against transformers' own answers; endpoints and judges that misbehave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from fastgrpo.config import RewardConfig, RewardFunctionConfig, RewardKind
from fastgrpo.config.reward_schema import RewardInput
from fastgrpo.errors import ConfigError, UserError
from fastgrpo.records import RewardRequest, Score
from fastgrpo.reward import Rewards, build_rewards
from fastgrpo.reward.judge import fill, read_judgement, read_template

CPU = torch.device("cpu")
REQUESTS = [
    RewardRequest("What is 3 + 4?", "7", "7", {}, 0, "u/0", 0),
    RewardRequest("What is 3 + 4?", "It is seven, " * 9, "7", {}, 0, "u/0", 1),
    RewardRequest("Why?", "Because.", None, {}, 0, "u/1", 0),
    RewardRequest("Why?", "", None, {}, 0, "u/1", 1),
]


@pytest.fixture(scope="session")
def make_classifier(
    make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """A tiny Llama or BERT with `num_labels` classes and the tokenizer of the tiny models."""

    def make(num_labels: int = 1, family: str = "llama", pad_is_end: bool = False) -> Path:
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        folder = tmp_path_factory.mktemp("classifier")
        tokenizer = AutoTokenizer.from_pretrained(make_tiny_model())
        if pad_is_end:
            tokenizer.pad_token = tokenizer.eos_token
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = AutoConfig.for_model(
            family,
            vocab_size=len(tokenizer),
            max_position_embeddings=512,
            num_labels=num_labels,
            initializer_range=0.5,
            **sizes,
        )
        config.pad_token_id = tokenizer.pad_token_id
        if num_labels > 1:
            config.id2label = {i: name for i, name in enumerate(("bad", "fair", "good")[:num_labels])}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


def build_model(folder: Path, **options: Any) -> Rewards:
    function = RewardFunctionConfig(kind=RewardKind["model"], path=str(folder), **options)
    rewards = build_rewards(RewardConfig(functions={"rm": function}))
    rewards.load(CPU)
    return rewards


def alone(
    folder: Path,
    request: RewardRequest,
    only_response: bool = False,
    chat: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits of one unpadded row, by transformers alone: the last token counts."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    if only_response:
        ids = tokenizer(request.response)["input_ids"]
    elif chat:
        text = f"<|im_start|>user\n{request.prompt}<|im_end|>\n<|im_start|>assistant\n{request.response}<|im_end|>\n"
        ids = tokenizer(text)["input_ids"]
    else:
        ids = tokenizer(request.prompt, request.response)["input_ids"]
    rows = torch.tensor([ids])
    if hasattr(model, "score"):  # a decoder: the head reads the last token, whatever the padding token is
        with torch.no_grad():
            hidden = model.model(input_ids=rows).last_hidden_state
            return model.score(hidden)[0, -1]
    with torch.no_grad():
        return model(input_ids=rows).logits[0]


@pytest.mark.parametrize("pad_is_end", [False, True])
@pytest.mark.parametrize("batch", [1, 3, 16])
def test_scores_are_those_of_each_row_alone(make_classifier: Callable[..., Path], pad_is_end: bool, batch: int) -> None:
    folder = make_classifier(pad_is_end=pad_is_end)
    scores = build_model(folder, micro_batch_size_per_gpu=batch).score(REQUESTS)
    expected = [alone(folder, request)[0].item() for request in REQUESTS]
    assert [s.total for s in scores] == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 3) for value in expected}) == 4  # they differ, so a mix-up would show


def test_what_the_model_reads_and_how_its_labels_count(make_classifier: Callable[..., Path]) -> None:
    folder = make_classifier(num_labels=3)
    said = [request for request in REQUESTS if request.response]
    for label, column in (("good", 2), ("0", 0)):
        scores = build_model(folder, label=label, input=RewardInput["response"]).score(said)
        expected = [alone(folder, request, only_response=True).softmax(0)[column].item() for request in said]
        assert [s.total for s in scores] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UserError, match=r"rm.label=None: the model has 3 labels, set .*: bad, fair, good"):
        build_model(folder)
    single = make_classifier()
    (score,) = build_model(single, sigmoid=True).score(REQUESTS[:1])
    assert score.total == pytest.approx(alone(single, REQUESTS[0])[0].sigmoid().item(), abs=1e-5)


def test_an_encoder_reads_a_pair(make_classifier: Callable[..., Path]) -> None:
    folder = make_classifier(family="bert")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    scores = build_model(folder).score(REQUESTS)
    expected = [alone(folder, request, chat=False)[0].item() for request in REQUESTS]
    assert [s.total for s in scores] == pytest.approx(expected, abs=1e-5)


def test_a_text_that_is_too_long_is_unscored(make_classifier: Callable[..., Path]) -> None:
    scores = build_model(make_classifier(), max_length=80).score(REQUESTS)
    assert [s.status for s in scores] == ["scored", "unscored", "scored", "scored"]
    assert "tokens, more than the 80 that the reward model reads" in str(scores[1].error)


def test_checkpoints_that_are_no_reward_models(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no weights for score.weight, so its scores would be random numbers"):
        build_model(tiny_model)
    with pytest.raises(UserError, match=r"functions.rm.path=.*no folder"):
        build_model(tmp_path / "missing")


def test_a_broken_folder_is_named(make_classifier: Callable[..., Path]) -> None:
    folder = make_classifier()
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(UserError, match=r"functions\.rm\.path: .* has no tokenizer that can be loaded"):
        build_model(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"functions\.rm\.path: the weights in .* cannot be read"):
        build_model(folder)


def test_label_and_sigmoid_must_fit_the_model(make_classifier: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match=r"rm\.label=good is not read: the model has one label"):
        build_model(make_classifier(), label="good")
    with pytest.raises(UserError, match=r"rm\.sigmoid=true is not read: the model has 3 labels"):
        build_model(make_classifier(num_labels=3), label="good", sigmoid=True)


def test_moving_leaves_the_weights_as_they_are(make_classifier: Callable[..., Path]) -> None:
    """The way to the device and back, with the host in the device's place."""
    rewards = build_model(make_classifier())
    (reward,) = rewards.functions
    before = [score.total for score in rewards.score(REQUESTS)]
    parameters = [parameter.data_ptr() for parameter in reward._model.parameters()]  # type: ignore[union-attr]
    reward._moves = True  # type: ignore[union-attr]
    with reward._on_device():  # type: ignore[union-attr]
        pass
    assert [score.total for score in rewards.score(REQUESTS)] == before
    assert [parameter.data_ptr() for parameter in reward._model.parameters()] == parameters  # type: ignore[union-attr]


@pytest.mark.gpu
def test_on_a_gpu_it_comes_and_goes(make_classifier: Callable[..., Path]) -> None:
    folder = make_classifier()
    rewards = build_rewards(
        RewardConfig(functions={"rm": RewardFunctionConfig(kind=RewardKind["model"], path=str(folder))})
    )
    square = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    square = square @ square  # cuBLAS keeps the workspace of its first product
    before = torch.cuda.memory_allocated()
    rewards.load(torch.device("cuda"))
    assert torch.cuda.memory_allocated() == before
    scores = [score.total for score in rewards.score(REQUESTS)]
    assert torch.cuda.memory_allocated() == before
    # bfloat16 throws this model's scores off by up to 0.11, here as there; a wrong row or token by 0.2 and more
    assert scores == pytest.approx([alone(folder, r, dtype=torch.bfloat16)[0].item() for r in REQUESTS], abs=0.05)


# Endpoints


class Server:
    """Answers POSTs with what `reply(body, count)` returns: (status, JSON), after what it may do before."""

    def __init__(self, reply: Callable[[dict, int], tuple[int, Any]]) -> None:
        self.bodies: list[dict] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    outer.bodies.append(body)
                    outer.paths.append(self.path)
                    outer.headers.append(dict(self.headers))
                    count = len(outer.bodies)
                status, answer = reply(body, count)
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """Clients that have gone."""

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def serving(reply: Callable[[dict, int], tuple[int, Any]]) -> Iterator[Server]:
    server = Server(reply)
    try:
        yield server
    finally:
        server.close()


def asked(kind: str, requests: list[RewardRequest] = REQUESTS, timeout_s: float = 20.0, **options: Any) -> list[Score]:
    function = RewardFunctionConfig(kind=RewardKind[kind], **options)
    rewards = build_rewards(RewardConfig(functions={"ask": function}, num_workers=1, timeout_s=timeout_s))
    try:
        return rewards.score(requests)
    finally:
        rewards.close()


def judged(text: str) -> dict:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_a_judge_reads_the_template_and_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(body: dict, count: int) -> tuple[int, Any]:
        text = body["messages"][0]["content"]
        number = "10" if ">\n7\n<" in text else "2.5"
        return 200, judged(f"Hm.\n```score\n{number}\n```")

    monkeypatch.setenv("MY_KEY", "secret")
    with serving(reply) as server:
        asked("judge", url=f"{server.url}/v1/chat/completions/", model="m", api_key_env="MY_KEY", max_tokens=9)
        scores = asked("judge", url=f"{server.url}/v1/", model="m", api_key_env="MY_KEY", max_tokens=9)
    assert [s.total for s in scores] == [1.0, 0.25, 0.25, 0.25]
    assert set(server.paths) == {"/v1/chat/completions"}
    assert {h.get("Authorization", h.get("authorization")) for h in server.headers} == {"Bearer secret"}
    body = next(b for b in server.bodies if ">\n7\n<" in b["messages"][0]["content"])
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 9)
    assert "What is 3 + 4?" in body["messages"][0]["content"]
    with pytest.raises(ConfigError, match="api_key_env=NO_KEY"):
        asked("judge", url="http://a/v1", model="m", api_key_env="NO_KEY")


def test_a_judge_that_fails_at_times() -> None:
    """A busy answer is asked again; no block: unscored; a plain refusal: error; none of them a 0."""

    def reply(body: dict, count: int) -> tuple[int, Any]:
        text = body["messages"][0]["content"]
        if text == "busy":
            return (503, "busy") if sum(b == body for b in server.bodies) == 1 else (200, judged("```\nyes\n```"))
        answers = {"mute": (200, judged("I cannot say.")), "odd": (200, {"choices": []}), "refused": (401, "no key")}
        return answers.get(text, (200, judged("```\nno\n```")))

    requests = [RewardRequest("p", text, None, {}, 0) for text in ("busy", "mute", "odd", "refused", "bad")]
    with serving(reply) as server:
        scores = asked("judge", requests, url=server.url, model="m", prompt_template="{response}", max_retries=2)
    assert [(s.status, s.total) for s in scores] == [
        ("scored", 1.0),
        ("unscored", None),
        ("error", None),
        ("error", None),
        ("scored", 0.0),
    ]
    assert scores[0].details == {"ask/unparsed": 0.0, "ask/retries": 1.0}
    assert scores[1].details["ask/unparsed"] == 1.0
    assert "no choices[0].message.content" in str(scores[2].error)
    assert "status 401: no key" in str(scores[3].error)


def test_an_endpoint_that_cannot_be_reached_ends_the_first_batch_and_is_an_error_later() -> None:
    with serving(lambda body, count: (200, {"score": 0.5})) as server:
        function = RewardFunctionConfig(kind=RewardKind["model"], url=server.url, max_retries=0)
        rewards = build_rewards(RewardConfig(functions={"ask": function}, num_workers=1, timeout_s=10.0))
        assert [s.total for s in rewards.score(REQUESTS)] == [0.5] * 4
        assert server.bodies[0].keys() == {"prompt", "response", "reference"}
    scores = rewards.score(REQUESTS)
    rewards.close()
    assert [(s.status, s.total) for s in scores] == [("error", None)] * 4
    assert "ConnectError" in str(scores[0].error) and server.url in str(scores[0].error)
    with pytest.raises(UserError, match=r"failed on all 4 samples of the first batch.*EndpointError"):
        asked("model", url=server.url, max_retries=1)


def test_an_endpoint_that_hangs_is_a_timeout_for_its_samples_alone() -> None:
    def reply(body: dict, count: int) -> tuple[int, Any]:
        if body["response"] == "7":
            time.sleep(3)
        return 200, {"score": 1}

    start = time.monotonic()
    with serving(reply) as server:
        scores = asked("model", url=server.url, timeout_s=1.0)
    assert [s.status for s in scores] == ["timeout", "scored", "scored", "scored"]
    assert time.monotonic() - start < 4


def test_a_score_that_is_none_is_the_endpoints_error() -> None:
    """It costs its sample, as status 500 does, and does not end the run."""
    scores = {"nan": "NaN", "text": '"0.3"', "huge": "1e999", "list": "[1]", "null": "null", "good": "0.5"}
    requests = [RewardRequest("p", name, None, {}, 0) for name in scores]
    with serving(lambda body, count: (200, {"score": json.loads(scores[body["response"]])})) as server:
        found = asked("model", requests, url=server.url)
    assert [s.status for s in found] == ["error"] * 4 + ["unscored", "scored"]
    assert "the score is neither a finite number nor null: 'nan'" in str(found[0].error)


def test_a_hundred_answers_are_judged_side_by_side() -> None:
    def reply(body: dict, count: int) -> tuple[int, Any]:
        time.sleep(0.2)
        return 200, {"score": float(body["response"])}

    requests = [RewardRequest("p", str(i), None, {}, 0) for i in range(100)]
    with serving(reply) as server:
        start = time.monotonic()
        scores = asked("model", requests, url=server.url)
    assert [s.total for s in scores] == [float(i) for i in range(100)]
    assert time.monotonic() - start < 10  # one after the other: 20 s


def test_places_that_a_template_has() -> None:
    example = 'As {"score": 1} or \\frac{a}{b}: {prompt} {response} {reference} {max_score} {key}'
    assert read_template(example, "o") == example
    for wrong, message in (
        ("{response} {foo}", r"o\.prompt_template has the place \{foo\}, .* \{prompt\}, \{response\}"),
        ("{prompt}", "no place for the answer"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_template(wrong, "o")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("```score\n7\n```", 0.7),
        ("```\n10\n```", 1.0),
        ("```score\n0\n```\n", 0.0),
        ("```\n3\n```\nno, rather\n```\n4\n```", 0.4),
        ("```\n7.5/10\n```", 0.75),
        ("```\nscore: 8\n```", 0.8),
        ("```\nYes.\n```", 1.0),
        ("```\nincorrect\n```", 0.0),
        ("<think>```\n9\n```</think>```\n1\n```", 0.1),
        ("```\n11\n```", None),
        ("```\n-1\n```", None),
        ("```\n7/20\n```", None),
        ("```\nseven\n```", None),
        ("7", None),
        ("```\n7", None),
        ("", None),
    ],
)
def test_reading_judgements(text: str, score: float | None) -> None:
    assert read_judgement(text, 10.0) == score


def test_an_answer_cannot_fill_places_or_close_its_tag() -> None:
    template = "<answer-{key}>{response}</answer-{key}> {reference} {max_score}"
    first = fill(template, "p", "{reference} {key} {prompt}", "42", 10.0)
    assert "{reference} {key} {prompt}" in first and first.endswith(" 42 10")
    assert first.split(">")[0] != fill(template, "p", "other", "42", 10.0).split(">")[0]


def test_templates(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("Rate {response}")
    judge = {"url": "http://a/v1", "model": "m"}
    for template, message in (("Rate it", "there is no file"), ("Rate {prompt}", "write {response} in it")):
        with pytest.raises(ConfigError, match=message):
            asked("judge", **judge, prompt_template=template)
    function = RewardFunctionConfig(kind=RewardKind["judge"], **judge, prompt_template=str(tmp_path / "t.txt"))
    build_rewards(RewardConfig(functions={"ask": function})).close()
