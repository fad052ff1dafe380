"""Tests of chat models behind an endpoint: requests, failures, the cache and the API key."""

import json
import logging
import ssl
import threading

import pytest
from chat_server import ChatServer, Fault, dropped, empty, garbage, slow, status, truncated
from jsonargparse import ArgumentParser

from lrl.chat.model import ChatModel, ConversationTooLongError, estimated_tokens
from lrl.chat.served import Failure, Prices, ServedChatModel, retry_after, retry_delay
from lrl.types import SamplingConfig

SAMPLING = SamplingConfig(temperature=0.5, max_new_tokens=7)
GATEWAY = b'{"error": {"message": "Provider returned error", "metadata": {"raw": "maximum context length is 8192"}}}'
KEY = "sk-stand-in-0123456789"


def respond(body):
    """Return a response that depends on the conversation, the seed and the temperature."""
    return f"{body['messages'][-1]['content']} {body['seed']} {body['temperature']}"


def say(*texts):
    return [[{"role": "system", "content": "Be short."}, {"role": "user", "content": text}] for text in texts]


@pytest.fixture(autouse=True, scope="module")
def no_certificates():
    """Skip loading certificates, which takes most of the time of creating a client; nothing here is encrypted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None)
        yield


@pytest.fixture
def server():
    with ChatServer(respond) as server:
        yield server


def model_of(server, waits=None, **settings):
    """Return a model that records the seconds of each pause instead of waiting."""
    model = ServedChatModel("stand-in", server.url, **{"max_concurrency": 1, **settings})
    waits = [] if waits is None else waits
    model.wait = lambda stop, seconds: waits.append(seconds)
    return model


def texts(completions):
    return [completion.text for completion in completions]


# -- requests -----------------------------------------------------------------------------------------------------


def test_a_request_contains_the_conversation_the_sampling_and_the_seed(server):
    model = model_of(server, extra_body={"reasoning_effort": "low"})
    sampling = SamplingConfig(temperature=0.5, top_p=0.9, top_k=3, max_new_tokens=7)
    (completion,) = model.complete(say("go"), sampling, [11])
    assert server.bodies == [
        {
            "model": "stand-in",
            "messages": say("go")[0],
            "temperature": 0.5,
            "max_tokens": 7,
            "seed": 11,
            "top_p": 0.9,
            "top_k": 3,
            "reasoning_effort": "low",
        }
    ]
    assert (completion.text, completion.finish_reason, completion.cached) == ("go 11 0.5", "stop", False)
    assert (completion.prompt_tokens, completion.completion_tokens) == (3, 3)


@pytest.mark.parametrize("field", ["max_completion_tokens", "num_predict"])
def test_the_field_for_the_maximum_number_of_tokens_can_be_renamed(server, field):
    model_of(server, max_tokens_field=field).complete(say("go"), SAMPLING, [1])
    assert server.bodies[0][field] == 7 and "max_tokens" not in server.bodies[0]


def test_null_fields_are_omitted_and_samples_with_different_seeds_still_differ(server, tmp_path):
    server.respond = lambda body: f"response {len(server.bodies)}"
    settings = {"extra_body": {"seed": None, "temperature": None}, "cache": str(tmp_path / "c.sqlite")}
    completions = model_of(server, **settings).complete(say("a", "a"), SAMPLING, [1, 2])
    assert texts(completions) == ["response 1", "response 2"]
    assert all(set(body) == {"model", "messages", "max_tokens"} for body in server.bodies)
    assert texts(model_of(server, **settings).complete(say("a", "a"), SAMPLING, [2, 1])) == texts(completions)[::-1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "x"}, "extra_body contains 'model', which lrl sets in each request; it must be left out."),
        ({"messages": []}, "extra_body contains 'messages'"),
        ({"stream": True}, "extra_body contains 'stream'"),
        ({"min_p": float("nan")}, "extra_body is {'min_p': nan}; it must be representable as JSON"),
    ],
)
def test_fields_that_cannot_be_sent_raise(fields, said):
    with pytest.raises(ValueError) as error:
        ServedChatModel("any", "http://127.0.0.1:1/v1", extra_body=fields)
    assert str(error.value).startswith(said)


def test_no_proxy_is_used_for_a_local_address(server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert texts(model_of(server, max_retries=0).complete(say("go"), SAMPLING, [1]))


def test_responses_are_in_the_order_of_the_conversations_and_equal_requests_are_sent_once(server):
    model = model_of(server, max_concurrency=4)
    completions = model.complete(say("a", "b", "a", "c", "a"), SAMPLING, [1, 2, 1, 3, 4])
    assert texts(completions) == ["a 1 0.5", "b 2 0.5", "a 1 0.5", "c 3 0.5", "a 4 0.5"]
    assert len(server.bodies) == 4 and model.usage.cached == 1


def test_the_number_of_simultaneous_requests_is_limited():
    barrier = threading.Barrier(3, timeout=10)  # breaks unless three requests run at once

    def together(body):
        barrier.wait()
        return "x"

    with ChatServer(together) as server:
        model_of(server, max_concurrency=3).complete(say(*"abcdef"), SAMPLING, range(6))
    assert server.at_once == 3


def test_separate_reasoning_is_placed_before_the_response(server):
    server.message = {"reasoning_content": "north is best"}
    assert texts(model_of(server).complete(say("up"), SAMPLING, [1])) == ["<think>north is best</think>up 1 0.5"]


def test_a_truncated_response_is_marked_and_may_be_empty(server):
    server.finish_reason, server.faults = "length", [empty()]
    (completion,) = model_of(server).complete(say("a"), SAMPLING, [1])
    assert (completion.text, completion.finish_reason) == ("", "length")


# -- failures ---------------------------------------------------------------------------------------------------------

FAULTS = {
    "rate limit": lambda: status(429),
    "server error": lambda: status(500),
    "overloaded": lambda: status(503),
    "truncated JSON": truncated,
    "no JSON": garbage,
    "JSON of something else": lambda: garbage("[1, 2]"),
    "no choices": lambda: garbage('{"choices": []}'),
    "no text": lambda: garbage('{"choices": [{"message": {"content": [{"text": "up"}]}}]}'),
    "no number of tokens": lambda: garbage('{"choices": [{"message": {}}], "usage": {"prompt_tokens": Infinity}}'),
    "JSON without end": lambda: garbage("[" * 100_000),
    "empty": empty,
    "connection cut": dropped,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_does_not_change_the_response_to_the_repeated_request(server, name):
    server.faults, waits = [FAULTS[name](), FAULTS[name]()], []
    model = model_of(server, waits)
    assert texts(model.complete(say("go"), SAMPLING, [11])) == ["go 11 0.5"]
    assert server.bodies[0] == server.bodies[1] == server.bodies[2]
    assert (model.usage.requests, model.usage.retries) == (3, 2)
    assert 0.5 <= waits[0] <= 1 and 1 <= waits[1] <= 2


def test_a_request_that_times_out_is_sent_again(server):
    server.faults = [slow(3.0)]
    model = model_of(server, timeout=0.5)
    assert texts(model.complete(say("go"), SAMPLING, [1])) == ["go 1 0.5"] and model.usage.retries >= 1


def test_a_restart_of_the_server_changes_no_response(server):
    model = model_of(server)
    expected = [f"{n} {n} 0.5" for n in range(6)]
    assert texts(model.complete(say("0", "1"), SAMPLING, [0, 1])) == expected[:2]
    server.stop()
    model.wait = lambda stop, seconds: model.usage.retries == 2 and server.start()
    assert texts(model.complete(say(*"2345"), SAMPLING, [2, 3, 4, 5])) == expected[2:]
    assert model.usage.retries == 3


def test_delays_double_up_to_a_maximum_with_jitter_that_is_the_same_in_every_run():
    delays = [retry_delay(retry, None, "a") for retry in range(8)]
    assert delays == [retry_delay(retry, None, "a") for retry in range(8)]
    assert all(most / 2 <= delay < most for delay, most in zip(delays, (1, 2, 4, 8, 16, 32, 60, 60), strict=True))
    assert delays != [retry_delay(retry, None, "b") for retry in range(8)]
    assert retry_delay(2000, None, "a") <= 60


def test_a_retry_waits_for_the_longer_of_backoff_and_retry_after(server):
    server.faults, waits = [status(429, **{"Retry-After": "90"}), status(503, **{"Retry-After": "0"})], []
    model_of(server, waits).complete(say("go"), SAMPLING, [1])
    assert waits[0] == 90 and 1 <= waits[1] <= 2


def test_retry_after_contains_seconds_or_a_date(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)  # 14 November 2023, 22:13:20 UTC
    assert retry_after({"retry-after": "1.5"}) == 1.5 and retry_after({"retry-after": "-3"}) == 0
    assert retry_after({"retry-after": "Tue, 14 Nov 2023 22:13:50 GMT"}) == 30
    assert retry_after({"retry-after": "Tue, 14 Nov 2023 22:00:00 GMT"}) == 0
    assert retry_after({"retry-after": "soon"}) is None and retry_after({}) is None


@pytest.mark.parametrize(
    "value",
    [
        *("inf", "-inf", "nan", "1e999", "1" * 5000 + "e9"),
        *("Tue, 14 Nov 99999 22:00:00 GMT", "Sat, 01 Jan 0000 00:00:00 GMT", "Sat, 01 Jan 0001 00:00:00 +2359"),
        *(
            "Tue, 99 Nov 2023 22:00:00 GMT",
            "Tue, 14 Nov 2023 22:00:00 -9999999999999999999",
            "Sat, 01 Jan 0001 00:00:00 -0000",
        ),
    ],
)
def test_an_invalid_retry_after_is_ignored(server, value):
    server.faults, waits = [status(429, **{"Retry-After": value})], []
    assert texts(model_of(server, waits).complete(say("go"), SAMPLING, [1])) == ["go 1 0.5"]
    assert 0.5 <= waits[0] <= 1, "the same as without Retry-After"


@pytest.mark.parametrize(
    "usage",
    [
        '{"prompt_tokens": 1e999, "completion_tokens": NaN}',
        f'{{"prompt_tokens": {10**30}, "completion_tokens": -1}}',
        f'{{"prompt_tokens": {"9" * 5000}, "completion_tokens": "{"9" * 5000}"}}',
        '{"prompt_tokens": {}, "completion_tokens": "many"}',
        *('{"prompt_tokens": null}', "[1, 2]", '"none"', "7", "null"),
    ],
    ids=lambda usage: usage[:30],
)
def test_invalid_token_counts_are_ignored_and_the_response_is_used(server, tmp_path, usage):
    server.usage, server.faults = False, [Fault(change=lambda body: body[:-1] + f', "usage": {usage}}}'.encode())]
    model = model_of(server, cache=str(tmp_path / "c.sqlite"))
    (completion,) = model.complete(say("go"), SAMPLING, [1])
    assert (completion.text, completion.prompt_tokens, completion.completion_tokens) == ("go 1 0.5", 0, 0)
    assert len(server.bodies) == 1 and model.responses.add("other", "m", completion) == completion


def test_unpaired_surrogates_in_a_response_are_replaced(server, tmp_path):
    server.respond, server.finish_reason = lambda body: "up \ud83d", "stop \ud83d"
    (completion,) = model_of(server, cache=str(tmp_path / "c.sqlite")).complete(say("go"), SAMPLING, [1])
    assert (completion.text, completion.finish_reason) == ("up ?", "stop ?") and len(server.bodies) == 1


def test_unpaired_surrogates_are_sent_as_question_marks(server):
    model_of(server).complete(say("go \ud83d"), SAMPLING, [1])
    assert server.bodies[0]["messages"][-1]["content"] == "go ?"


@pytest.mark.parametrize("charset", ["hex", "rot13", "utf-16", "undefined", "no such codec"])
@pytest.mark.parametrize("code", [200, 503])
def test_a_response_is_decoded_as_utf8_even_if_its_header_names_another_charset(server, charset, code):
    server.faults = [Fault(code, {"Content-Type": f"application/json; charset={charset}"})]
    assert texts(model_of(server).complete(say("g\xf6"), SAMPLING, [1])) == ["g\xf6 1 0.5"]
    assert len(server.bodies) == (1 if code == 200 else 2)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (status(500, "broken"), "failed 3 times for the model 'stand-in' (500: broken); no response is kept, because"),
        (truncated(), "failed 3 times for the model 'stand-in' (no chat completion but"),
        (empty(), "(an empty response; accept_empty is false)"),
        (dropped(), "(no connection, "),
        (status(429, "wait", **{"Retry-After": "9999"}), "failed once for the model 'stand-in' (429: wait)"),
        (status(429, "pay", "insufficient_quota"), "rejects the request for the model 'stand-in' (429: pay)"),
        (status(400, "top_k is\nunknown"), "rejects the request for the model 'stand-in' (400: top_k is unknown)."),
        (status(404, "no such model"), "(404: no such model)."),
        (status(401, "who?"), "requires a valid key; NO_SUCH_VARIABLE is not set (401: who?)."),
    ],
)
def test_a_permanent_failure_raises_one_sentence(server, fault, said):
    server.faults = [fault] * 9
    model = model_of(server, max_retries=2, api_key_env="NO_SUCH_VARIABLE")
    with pytest.raises(ValueError) as error:
        model.complete(say("go"), SAMPLING, [1])
    assert said in str(error.value) and "\n" not in str(error.value) and server.url in str(error.value)
    assert len(server.bodies) == (3 if "3 times" in said or "(no con" in said or "(an em" in said else 1)


@pytest.mark.parametrize(
    ("fault", "too_long"),
    [
        (status(400, "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens."), True),
        (status(400, "Please reduce the length of the messages.", "context_length_exceeded"), True),
        (status(400, "The decoder prompt (length 99) is longer than the maximum model length of 64."), True),
        (status(400, "the request exceeds the available context size, try increasing it"), True),
        (status(400, "prompt is too long: 210000 tokens > 200000 maximum"), True),
        (status(400, "The input token count (99) exceeds the maximum number of tokens allowed (64)."), True),
        (status(422, "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000"), True),
        (status(413, "Request too large for gpt-oss on tokens per minute"), True),
        (status(413, "Payload Too Large"), True),
        (status(400, "litellm.ContextWindowExceededError"), True),
        (status(400, 300 * "the prompt " + "exceeds the maximum context length"), True),
        (Fault(400, {}, lambda _: GATEWAY), True),
        (status(400, "top_k is unknown"), False),
        (status(404, "no such model with this context length"), False),
    ],
)
def test_a_conversation_rejected_as_too_long_raises_its_own_error(server, fault, too_long):
    server.faults = [fault]
    with pytest.raises(ValueError, match="which rejects the request for the model 'stand-in'") as caught:
        model_of(server).complete(say("go"), SAMPLING, [1])
    assert isinstance(caught.value, ConversationTooLongError) == too_long and len(server.bodies) == 1


def test_fits_checks_the_configured_context_length(server):
    (conversation,), (long,) = say("params[0]: -1.5; f(params): 23.40"), say("1" * 80)
    assert model_of(server).fits(say("1" * 10**6)[0], SAMPLING), "without a context length the server decides"
    model = model_of(server, context_length=80)
    assert model.fits(conversation, SAMPLING) and not model.fits(long, SAMPLING)
    assert not model.fits(conversation, SamplingConfig(max_new_tokens=50))
    with pytest.raises(ValueError, match="chat_model.context_length is 0; it must be at least 1, or null"):
        model_of(server, context_length=0)


@pytest.mark.parametrize(
    ("text", "tokens"), [("params[10]: -1.5;", 12), ("1.5 -2.0 = 23.40\n", 15), ("episodes", 2), ("北é", 5)]
)
def test_estimated_tokens_count_one_token_per_digit(text, tokens):
    assert estimated_tokens([{"role": "user", "content": text}]) == 8 + tokens


def test_the_error_is_that_of_the_request_that_failed_permanently(server):
    """The first request waits for its retry while the second is rejected."""
    waits, sent = threading.Event(), []

    def send(body):
        sent.append(body["messages"][-1]["content"])
        if sent[-1] == "a":
            return Failure(reason="busy", status=500)
        assert waits.wait(10)
        return Failure(reason="who?", status=401, transient=False)

    def wait(stop, seconds):
        waits.set()
        assert stop.wait(10)

    model = model_of(server, max_concurrency=2)
    model._post, model.wait = send, wait
    with pytest.raises(ValueError, match=r"requires a valid key.*\(who\?\)"):
        model.complete(say("a", "b"), SAMPLING, [1, 2])
    assert sorted(sent) == ["a", "b"]


def test_a_server_that_cannot_be_reached_raises_one_sentence(server):
    server.stop()
    with pytest.raises(ValueError, match=r"which failed 3 times .*no connection, .*refused"):
        model_of(server, max_retries=2).complete(say("go"), SAMPLING, [1])


def test_accept_empty_accepts_an_empty_response(server):
    server.faults = [empty()]
    assert texts(model_of(server, accept_empty=True).complete(say("a"), SAMPLING, [1])) == [""]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "must be an address such as"),
        ("file:///etc", "must be an address such as"),
        ("http://host:port/v1", "api_url is 'http://host:port/v1'; it must be an address such as"),
        ("http://[::1/v1", "must be an address such as"),
        ("http://a..b/v1", "must be an address such as"),
        ("http://the host/v1", "must be an address such as"),
        ("https://host/v1#secret", "keys are read from the environment"),
        ("me:secret@host/v1", "keys are read from the environment"),
        ("https://me:secret@host/v1", "keys are read from the environment"),
        ("https://host/v1?key=secret", "keys are read from the environment"),
    ],
)
def test_an_invalid_address_raises_without_repeating_what_may_be_secret(url, said):
    with pytest.raises(ValueError, match=said) as error:
        ServedChatModel("any", url)
    assert "secret" not in str(error.value)


# -- the cache -----------------------------------------------------------------------------------------------------


def test_repeated_requests_are_answered_from_the_cache_at_no_cost(server, tmp_path):
    file, prices = str(tmp_path / "new" / "responses.sqlite"), Prices(prompt=1_000_000, completion=2_000_000)
    first = model_of(server, cache=file, prices=prices)
    asked = first.complete(say("a", "b"), SAMPLING, [1, 2])
    again = model_of(server, cache=file, prices=prices)
    known = again.complete(say("b", "a"), SAMPLING, [2, 1])
    assert texts(known) == texts(asked)[::-1] and all(completion.cached for completion in known)
    assert len(server.bodies) == 2
    assert first.report() == {
        "requests": 2,
        "retries": 0,
        "cached": 0,
        "prompt_tokens": 6,
        "completion_tokens": 6,
        "cost": 18.0,
    }
    assert again.report()["cost"] == 0 and again.usage.cached == 2 and model_of(server).report()["cost"] is None


@pytest.mark.parametrize(
    ("messages", "sampling", "seed", "settings"),
    [
        (say("b"), SAMPLING, 1, {}),
        (say("a"), SamplingConfig(temperature=0.6, max_new_tokens=7), 1, {}),
        (say("a"), SamplingConfig(temperature=0.5, max_new_tokens=8), 1, {}),
        (say("a"), SamplingConfig(temperature=0.5, max_new_tokens=7, top_p=0.5), 1, {}),
        (say("a"), SAMPLING, 2, {}),
        (say("a"), SAMPLING, 1, {"extra_body": {"min_p": 0.1}}),
        (say("a"), SAMPLING, 1, {"name": "other"}),
    ],
)
def test_a_request_that_differs_is_not_found_in_the_cache(server, tmp_path, messages, sampling, seed, settings):
    file = str(tmp_path / "responses.sqlite")
    model_of(server, cache=file).complete(say("a"), SAMPLING, [1])
    other = ServedChatModel(**{"name": "stand-in", "api_url": server.url, "cache": file, **settings})
    other.complete(messages, sampling, [seed])
    assert len(server.bodies) == 2


def test_a_cached_empty_response_is_requested_again_without_accept_empty(server, tmp_path):
    server.faults, file = [empty()], str(tmp_path / "responses.sqlite")
    for accept_empty, expected in ((True, ""), (True, ""), (False, "a 1 0.5"), (True, "a 1 0.5")):
        model = model_of(server, cache=file, accept_empty=accept_empty)
        assert texts(model.complete(say("a"), SAMPLING, [1])) == [expected]
    assert len(server.bodies) == 2


def test_the_cache_distinguishes_servers(server, tmp_path):
    file = str(tmp_path / "responses.sqlite")
    model_of(server, cache=file).complete(say("a"), SAMPLING, [1])
    with ChatServer(respond) as other:
        model_of(other, cache=file).complete(say("a"), SAMPLING, [1])
        assert len(other.bodies) == 1


def test_responses_before_a_permanent_failure_are_in_the_cache(server, tmp_path):
    file = str(tmp_path / "responses.sqlite")
    server.faults = [None, None, status(400, "no")]
    with pytest.raises(ValueError, match="400"):
        model_of(server, cache=file).complete(say(*"abcd"), SAMPLING, range(4))
    assert len(server.bodies) == 3  # no request starts after a permanent failure
    model = model_of(server, cache=file)
    assert texts(model.complete(say(*"abcd"), SAMPLING, range(4))) == [f"{c} {n} 0.5" for n, c in enumerate("abcd")]
    assert model.usage.cached == 2 and len(server.bodies) == 5


def test_no_further_request_is_sent_if_the_cache_cannot_be_written(server, tmp_path):
    model = model_of(server, cache=str(tmp_path / "c.sqlite"))
    model.complete(say("first"), SAMPLING, [1])
    model.responses._connection.execute("PRAGMA max_page_count = 1")
    server.respond = lambda body: "long " * 9999
    with pytest.raises(ValueError, match="disk is full"):
        model.complete(say(*map(str, range(20))), SAMPLING, range(20))
    assert len(server.bodies) == 2


def test_the_error_states_the_number_of_cached_responses(server, tmp_path):
    server.faults, file = [None, *[status(500)] * 9], tmp_path / "responses.sqlite"
    with pytest.raises(ValueError, match=r"; 1 responses are kept in '.*responses.sqlite', and the same command re"):
        model_of(server, cache=str(file), max_retries=1).complete(say(*"ab"), SAMPLING, [1, 2])


# -- the key ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["OPENAI_API_KEY", "OTHER_KEY"])
def test_the_key_comes_from_the_environment(server, monkeypatch, variable):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-one")
    monkeypatch.setenv(variable, KEY)
    model_of(server, api_key_env=variable).complete(say("a"), SAMPLING, [1])
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


def test_the_key_is_in_no_log_error_response_or_file(server, tmp_path, monkeypatch, caplog):
    """The server repeats the key in responses and errors."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    server.respond = lambda body: f"your key is {KEY}"
    server.faults = [status(500, f"bad {KEY}"), garbage(f"{KEY} is no JSON"), None, status(401, f"Incorrect: {KEY}")]
    model = model_of(server, cache=str(tmp_path / "responses.sqlite"))
    server.finish_reason = f"stop of {KEY}"
    (completion,) = model.complete(say("a"), SAMPLING, [1])
    message = "requires a valid key; OPENAI_API_KEY contains a key that was not accepted"
    with pytest.raises(ValueError, match=message) as error:
        model.complete(say("b"), SAMPLING, [2])
    client = vars(model)["_client"]
    caught, seen = error.value, [completion.text, caplog.text, repr(vars(model)), json.dumps(model.report())]
    seen += [repr(vars(client)), repr(client.default_headers)]
    while caught is not None:
        seen.append(f"{caught!r} {vars(caught)}")
        caught = caught.__cause__ or caught.__context__
    assert completion.text == "your key is <API key>" and caplog.text.count("<API key>") >= 2
    assert not any(KEY in text for text in seen)
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("letters", range(170, 201, 6))
def test_a_truncated_message_shows_no_part_of_the_key(server, monkeypatch, letters):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.faults = [garbage("x" * (letters - 140) + KEY), status(400, "x" * letters + KEY)]
    with pytest.raises(ValueError, match="xxx") as error:
        model_of(server).complete(say("a"), SAMPLING, [1])
    assert KEY[:2] not in str(error.value)


@pytest.mark.parametrize("key", ["sk-one-line\nsk-another-line", "sk-\u2019quoted\u2019", "sk-\tindented"])
def test_an_invalid_key_raises_without_repeating_it_and_is_not_sent(server, monkeypatch, caplog, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError, match="the environment variable OPENAI_API_KEY contains several lines or") as error:
        model_of(server).complete(say("a"), SAMPLING, [1])
    assert "sk-" not in f"{error.value!r} {caplog.text}" and not server.bodies


@pytest.mark.parametrize(
    "name",
    [
        KEY,
        "sk_live_0123456789abcdef",
        "hf_AbCdEfGhIjKlMnOpQr0123",
        "0" * 8 + "ab" * 12,
        "AKIA0123456789ABCDEF",
        "MY KEY",
        "",
        "1A",
    ],
)
def test_a_key_in_place_of_a_variable_name_raises_without_repeating_it(server, name):
    with pytest.raises(ValueError, match="^api_key_env is not the name of an environment variable") as error:
        model_of(server, api_key_env=name)
    assert not name or name not in f"{error.value!r}"


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "_key2", "MISTRAL_API_KEY_2_OF_MINE", "my_team_api_key_2"])
def test_names_of_environment_variables_are_accepted(server, name, monkeypatch):
    if name == "my_team_api_key_2":  # looks like a key, so the variable must exist
        monkeypatch.setenv(name, KEY)
    model_of(server, api_key_env=name)


# -- configurations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["served.ServedChatModel", "local.LocalChatModel"])
def test_a_configuration_names_a_chat_model_by_its_class(kind, monkeypatch):
    """A YAML configuration names the class and its settings, but not the key."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--chat_model", type=ChatModel)
    served = {"name": "any", "api_url": "http://127.0.0.1:1/v1", "max_retries": 2, "prices": None}
    settings = served if kind.startswith("served") else {"language_model": {"name": "assets/tiny-lm"}}
    config = parser.parse_object({"chat_model": {"class_path": f"lrl.chat.{kind}", "init_args": settings}})
    model = parser.instantiate(config)["chat_model"]
    assert type(model).__name__ == kind.split(".")[1] and KEY not in parser.dump(config)
    assert model.name == ("any" if "name" in settings else "assets/tiny-lm")
    if "name" in settings:
        assert model.max_retries == 2
