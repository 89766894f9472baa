"""Collectives across groups, of which a peer may never come or may be given up."""

from __future__ import annotations

import threading
import time

import torch

from train_jobs.elastic.exchange import Exchange
from train_jobs.parallel.rendezvous import open_store

TIMEOUT_S = 30.0


def test_who_waits_for_a_peer_that_never_comes_can_be_told_to_give_up() -> None:
    _, address = open_store("127.0.0.1")
    exchange = Exchange(torch.device("cpu"), TIMEOUT_S)
    threading.Timer(0.3, exchange.give_up, ["a group of this view is gone"]).start()
    began = time.monotonic()
    exchange.configure(f"{address}/1", "a/0", 0, 2)
    assert time.monotonic() - began < TIMEOUT_S / 3
    assert str(exchange.failure) == "a group of this view is gone"
    assert not exchange.sum(torch.ones(1)), "nothing is reduced under this view any more"


def test_after_giving_up_the_next_view_is_met_as_if_nothing_had_been() -> None:
    _, address = open_store("127.0.0.1")
    exchanges = [Exchange(torch.device("cpu"), TIMEOUT_S) for _ in range(2)]
    threading.Timer(0.2, exchanges[0].give_up, ["it is gone"]).start()
    exchanges[0].configure(f"{address}/1", "a/0", 0, 2)
    tensors = [torch.tensor([1.0]), torch.tensor([2.0])]

    def meet(index: int) -> None:
        exchanges[index].configure(f"{address}/2", f"{index}/0", index, 2)
        assert exchanges[index].sum(tensors[index])

    threads = [threading.Thread(target=meet, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert [tensor.item() for tensor in tensors] == [3.0, 3.0]


def test_who_is_alone_gives_up_as_well_until_the_next_view() -> None:
    exchange = Exchange(torch.device("cpu"), TIMEOUT_S)
    exchange.configure("nobody:0/1", "a/0", 0, 1)
    assert exchange.alone
    assert exchange.sum(torch.ones(1))
    exchange.give_up("others have agreed on another view")
    assert not exchange.alone
    assert not exchange.sum(torch.ones(1))
    exchange.configure("nobody:0/2", "a/0", 0, 1)
    assert exchange.alone
