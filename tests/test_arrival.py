"""Waiting for a device that never gets there ends with the time that the ranks have."""

import time

import pytest
import torch

from distdec.arrival import Arrival, Patience, StepStuck


class Event:
    """An event that the device reaches after so many looks; None: never."""

    def __init__(self, looks):
        self.looks = looks

    def query(self):
        if self.looks is not None:
            self.looks -= 1
        return self.looks is not None and self.looks < 0


@pytest.mark.parametrize("looks", [0, 1, 50])
def test_a_device_that_gets_there_is_waited_for(looks):
    event = Event(looks)
    patience = Patience(30.0)
    patience.wait(event)
    assert event.looks == -1
    assert not patience.stuck


def test_a_device_that_never_gets_there_ends_the_wait_in_time():
    start, patience = time.monotonic(), Patience(0.2)
    with pytest.raises(StepStuck, match=r"within parallel.timeout_s=0.2 s: a rank is lost"):
        patience.wait(Event(None))
    assert 0.2 <= time.monotonic() - start < 5.0


def test_a_device_that_was_given_up_is_not_waited_for_again():
    patience = Patience(0.0)
    with pytest.raises(StepStuck):
        patience.wait(Event(None))
    patience.timeout_s = 300.0
    start = time.monotonic()
    with pytest.raises(StepStuck):
        patience.wait(Event(None))
    assert time.monotonic() - start < 5.0


def test_tokens_arrive_as_they_were_chosen():
    assert Arrival(torch.tensor([7, -1, 3]), Patience()).read() == [7, -1, 3]


@pytest.mark.gpu
def test_tokens_of_a_device_that_is_busy_are_given_up_in_time():
    tokens = torch.tensor([7, -1, 3], device="cuda")
    assert Arrival(tokens, Patience(30.0)).read() == [7, -1, 3]
    # some seconds of work in front of them
    torch.cuda._sleep(8_000_000_000)
    patience = Patience(0.2)
    arrival = Arrival(tokens, patience)
    with pytest.raises(StepStuck):
        arrival.read()
    torch.cuda.synchronize()
    patience.stuck = False
    assert arrival.read() == [7, -1, 3]
