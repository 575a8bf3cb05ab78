"""What the P/D proxy of the examples decides: which server, and which bodies."""

import sys

import pytest
from examples.pd_proxy.__main__ import main
from examples.pd_proxy.bodies import (
    decode_body,
    prefill_body,
    prompt_hashes,
    read_body,
    token_ids_in,
    tokenize_body,
)
from examples.pd_proxy.servers import MAX_EXTRA_REQUESTS, REST_S, Server, ranked

from kvferry.proto.hashing import make_scheme
from kvferry.proto.ids import BlockHash

SCHEME = make_scheme(hash_block_tokens=4)


def chain(text: str) -> tuple[BlockHash, ...]:
    """Stand-in for a hash chain: each block's hash is the text up to its end."""
    return tuple(BlockHash(text[:end].encode()) for end in range(1, len(text) + 1))


def servers(count: int, *, max_blocks: int = 100) -> list[Server]:
    return [Server(f"http://host:{port}", max_blocks=max_blocks) for port in range(count)]


def best(of: list[Server], text: str, now_s: float = 1.0) -> int:
    return of.index(ranked(of, chain(text), now_s)[0])


def test_the_longest_held_prefix_wins_over_requests_in_flight() -> None:
    three = servers(3)
    three[1].remember(chain("abcd"))
    three[2].remember(chain("ab"))
    with three[1].taking(0.0):
        assert best(three, "abcxyz") == 1
        assert best(three, "abx") == 2


def test_of_equals_the_one_with_fewest_requests_in_flight_is_taken_then_they_take_turns() -> None:
    three = servers(3)
    with three[0].taking(1.0):
        assert best(three, "a") == 1
    turns = []
    for now_s in range(2, 8):
        turns.append(best(three, "a"))
        with three[turns[-1]].taking(now_s):
            pass
    assert turns == [1, 2, 0, 1, 2, 0]


def test_a_prefix_that_all_prompts_share_does_not_send_all_of_them_to_one_server() -> None:
    two = servers(2)
    two[0].remember(chain("a"))
    two[0].in_flight = MAX_EXTRA_REQUESTS
    assert best(two, "ab") == 0
    two[0].in_flight += 1
    assert best(two, "ab") == 1


def test_a_server_that_failed_rests_and_is_believed_to_hold_nothing() -> None:
    two = servers(2)
    two[0].remember(chain("abcd"))
    two[1].last_sent_s = 1.0
    two[0].failed(now_s=10.0)
    assert best(two, "abcd", now_s=10.0 + REST_S / 2) == 1
    assert best(two, "abcd", now_s=10.0 + REST_S) == 0
    assert two[0].num_held(chain("abcd")) == 0


def test_what_is_believed_to_be_held_is_bounded_and_the_ends_of_prompts_go_first() -> None:
    (server,) = servers(1, max_blocks=4)
    server.remember(chain("abc"))
    server.remember(chain("xyz"))
    assert server.num_held(chain("xyz")) == 3
    assert server.num_held(chain("abc")) == 1
    server.remember(chain("abc"))
    assert server.num_held(chain("abc")) == 3
    assert server.num_held(chain("xyz")) == 1


def test_the_hashes_of_a_prompt_depend_on_tokens_model_and_salt() -> None:
    tokens = list(range(10))
    one = prompt_hashes(SCHEME, {"model": "m"}, tokens)
    assert len(one) == 2
    assert prompt_hashes(SCHEME, {"model": "m"}, tokens[:9]) == one
    assert not set(one) & set(prompt_hashes(SCHEME, {"model": "adapter"}, tokens))
    assert not set(one) & set(prompt_hashes(SCHEME, {"model": "m", "cache_salt": "s"}, tokens))


@pytest.mark.parametrize("body", [{"cache_salt": 5}, {"cache_salt": ""}, {"model": ["m"]}])
def test_what_no_server_takes_has_no_hashes(body: dict[str, object]) -> None:
    assert prompt_hashes(SCHEME, body, [1, 2, 3, 4]) == ()
    assert prompt_hashes(SCHEME, {}, [1, 2, 3, -4]) == ()


def test_only_one_list_of_ids_is_read_as_tokens_and_only_one_text_is_tokenized() -> None:
    assert token_ids_in({"prompt": [1, 2]}) == [1, 2]
    for prompt in ("text", [[1], [2]], ["text"], [True], None):
        assert token_ids_in({"prompt": prompt}) is None
    assert tokenize_body({"prompt": ["one", "two"]}) is None
    assert tokenize_body({"prompt_embeds": "..."}) is None
    assert tokenize_body({"model": "m", "prompt": "text", "max_tokens": 4}) == {
        "model": "m",
        "prompt": "text",
    }
    chat = {"messages": [], "tools": [], "add_generation_prompt": True}
    assert tokenize_body(chat | {"temperature": 0, "stream": True}) == chat


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_reads_as_an_empty_one(raw: bytes) -> None:
    assert read_body(raw) == {}


def test_a_prefill_is_the_same_prompt_with_one_token_at_once() -> None:
    transfer = {"do_remote_decode": True, "do_remote_prefill": False}
    length = {"max_tokens": 9, "max_completion_tokens": 9, "min_tokens": 5, "n": 2}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    rest = {"model": "m", "temperature": 0, "cache_salt": "s"}
    assert prefill_body({"prompt": "text", **rest, **length, **stream}) == {
        "prompt": "text",
        **rest,
        "max_tokens": 1,
        "stream": False,
        "kv_transfer_params": transfer,
    }
    assert prefill_body({"messages": [], **rest, **length, **stream}) == {
        "messages": [],
        **rest,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": transfer,
    }


def test_a_decode_is_the_clients_request_with_what_the_prefill_said() -> None:
    body = {"prompt": "text", "max_tokens": 9, "stream": True}
    said = {"remote_host": "h", "do_remote_decode": True, "do_remote_prefill": False}
    assert decode_body(body, said) == {
        **body,
        "kv_transfer_params": {
            "remote_host": "h",
            "do_remote_decode": False,
            "do_remote_prefill": True,
        },
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--decode", "http://h:1", "--host", "0.0.0.0"], "anyone on the network"),
        (["--decode", "h:1"], "'h:1' is no URL such as http://127.0.0.1:8100"),
        (["--decode", "http://h:1", "--block-tokens", "0"], "'0' is no whole number above 0"),
        ([], "--decode"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    options: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["pd_proxy", *options])
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main())
    assert said in capsys.readouterr().err
