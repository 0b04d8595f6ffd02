"""A server of OpenAI's protocol over made laws, in memory, that fails as servers do."""

import json

import httpx
import numpy as np

from support.served_laws import Bank, inverse

K = 10


class FakeServer:
    """Answers requests by a bank's laws; ``troubles`` are what it does first, one a request.

    A trouble is a status, or: ``die``, ``cut`` (after three tokens), ``garbage``, ``no logprobs``
    (from the fourth token), ``error`` (an event).
    """

    def __init__(
        self,
        seed=0,
        *,
        troubles=(),
        leak=0.0,
        habit="beside",
        processed=False,
        drafts=False,
        accepted=0,
    ):
        self.bank = Bank.made(seed, laws=256, vocab=40)
        self.rng = np.random.default_rng(seed)
        self.troubles = list(troubles)
        self.leak, self.habit, self.processed = leak, habit, processed
        self.drafts = drafts  # nothing is listed of the tokens after an answer's first
        self.accepted = accepted  # drafts that are said to be accepted in every answer
        self.bodies = []
        self.refused = {}  # fields that are refused with 400, as long as they have these values

    def transport(self):
        return httpx.MockTransport(self.answer)

    def answer(self, request):
        body = json.loads(request.content)
        self.bodies.append(body)
        if any(body.get(name) == value for name, value in self.refused.items()):
            return httpx.Response(400, text="unknown field")
        trouble = self.troubles.pop(0) if self.troubles else None
        if isinstance(trouble, int):
            return httpx.Response(trouble, headers={"retry-after": "0"})
        if trouble == "die":
            raise httpx.ConnectError("refused", request=request)
        chat = request.url.path.endswith("chat/completions")
        events = b"".join(self.events(body, trouble, chat=chat))
        headers = {"content-type": "text/event-stream"}
        if trouble == "cut":
            return httpx.Response(200, headers=headers, stream=Cut(events))
        return httpx.Response(200, headers=headers, content=events)

    def events(self, body, trouble, *, chat):
        for index in range(body.get("n", 1)):
            prompt = body["messages"][0]["content"] if chat else body["prompt"]
            rng = np.random.default_rng(body["seed"]) if "seed" in body else self.rng
            text, *before = prompt if isinstance(prompt, list) else [prompt]
            law = len(text) * 7 % len(self.bank.p)
            for token in before:
                law = int(self.bank.following(law, token))
            for t in range(3 if trouble == "cut" else body["max_tokens"]):
                if trouble == "garbage" and t == 3:
                    yield b"data: {nonsense\n\n"
                    return
                if trouble == "error" and t == 3:
                    yield b'data: {"error": {"message": "out of memory"}}\n\n'
                    return
                token, reported = self.draw(law, body.get("temperature", 1.0), rng)
                logprobs = self.logprobs(token, reported, body, chat=chat)
                if trouble == "no logprobs" and t > 3:
                    logprobs = None
                if self.drafts and t > 0:
                    logprobs["top_logprobs"] = [None]
                told = {"index": index, "logprobs": logprobs, "finish_reason": None}
                told |= {"delta": {"content": f" {token}"}} if chat else {"text": f" {token}"}
                if t + 1 == body["max_tokens"]:
                    told["finish_reason"] = "length"
                yield f"data: {json.dumps({'choices': [told]})}\n\n".encode()
                law = int(self.bank.following(law, token))
        if body.get("stream_options") == {"include_usage": True} and trouble is None:
            count = body["max_tokens"]
            forwards = {"target_forwards": count - 1, "accepted_prediction_tokens": self.accepted}
            usage = {"completion_tokens": count, "completion_tokens_details": forwards}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()
        if trouble != "cut":
            yield b"data: [DONE]\n\n"

    def draw(self, law, temperature, rng):
        logits = np.log(self.bank.p[law])
        weights = np.exp((logits - logits.max()) / max(temperature, 1e-3))
        weights /= weights.sum()
        leaks = rng.random() < self.leak
        token = int(weights.argmax() if leaks else inverse(weights[None], rng.random(1))[0])
        return token, weights if self.processed else self.bank.p[law]

    def logprobs(self, token, probs, body, *, chat):
        k = body["top_logprobs"] if chat else body["logprobs"]
        values = np.log(np.maximum(probs, 1e-300))
        likely = np.argsort(-values, kind="stable")[:k].tolist()
        if self.habit == "in place" and token not in likely:
            likely = [token, *likely[:-1]]
        elif self.habit == "beside" and token not in likely and not chat:
            likely = [token, *likely]
        said = [{"id": t, "token": f" {t}", "logprob": float(values[t])} for t in likely]
        if chat:
            one = {"id": token, "token": f" {token}", "logprob": float(values[token])}
            return {"content": [{**one, "top_logprobs": said}]}
        return {
            "tokens": [f"token_id:{token}"],
            "token_logprobs": [float(values[token])],
            "top_logprobs": [{f"token_id:{e['id']}": e["logprob"] for e in said}],
        }


class Cut(httpx.AsyncByteStream):
    """A stream that breaks off."""

    def __init__(self, content):
        self.content = content

    async def __aiter__(self):
        yield self.content
        raise httpx.ReadError("connection reset")
