"""Customers' messages, made of templates: what is wrong, said with what, to whom.

Each department has problems of its own. A held-out message tells a problem that no training message
tells, in other words, so that its department is known from what it means, not from its sentence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Department = Literal["billing", "technical", "shipping", "account"]
DEPARTMENTS: tuple[Department, ...] = get_args(Department)

#: What a customer tells; the first `_LEARNED` of each department are those of training messages.
PROBLEMS: dict[Department, tuple[str, ...]] = {
    "billing": (
        "I was charged twice for the {thing} this month.",
        "My card was debited {amount}, but the price on your page is lower.",
        "I sent the {thing} back and still have no refund.",
        "The invoice for the {thing} has the wrong VAT number.",
        "Why is there a fee of {amount} on my statement?",
        "My discount code was not taken off the price of the {thing}.",
        "I would like to pay for the {thing} in three instalments.",
        "Please send me a receipt for the {thing}, my employer pays me back.",
        "The payment fails at the checkout although my bank says that all is fine.",
        "You took {amount} from my bank although the trial is free.",
        "How long does it take until the money for the {thing} is returned?",
        "The subscription became more expensive and nobody told me.",
        # held out
        "There are two withdrawals of {amount} and I only bought one {thing}.",
        "I need a corrected bill for the {thing} with the name of my company.",
        "When do I get my {amount} back?",
        "The coupon for ten percent off did nothing, I paid the full price.",
    ),
    "technical": (
        "The {thing} does not turn on any more.",
        "The app crashes whenever I connect the {thing}.",
        "The {thing} loses its Bluetooth connection every few minutes.",
        "Since the last update the {thing} shows error 42.",
        "The battery of the {thing} is empty after an hour.",
        "The screen of the {thing} stays black.",
        "How do I reset the {thing} to its factory settings?",
        "There is a loud noise when the {thing} is running.",
        "The {thing} is not found by my wireless network.",
        "The firmware of the {thing} hangs at 80 percent.",
        "The buttons of the {thing} do not react.",
        "The {thing} gets very hot while it charges.",
        # held out
        "The {thing} freezes and I have to restart it again and again.",
        "I cannot pair the {thing} with my phone.",
        "A red light blinks on the {thing} and nothing works.",
        "The software of the {thing} stops with a message that I do not understand.",
    ),
    "shipping": (
        "My {thing} was to arrive on Monday and is not here yet.",
        "The tracking number of my parcel is not known to the carrier.",
        "The box with the {thing} was left in the rain.",
        "Can the {thing} be delivered to my neighbour?",
        "I got somebody else's parcel instead of the {thing}.",
        "The courier says that nobody was at home, but I was.",
        "How much longer will the {thing} be on its way?",
        "Please send the {thing} to another address, it has not left yet.",
        "One of the two parcels is missing, the {thing} was in it.",
        "The tracking page has said 'in transit' for nine days.",
        "Do you deliver the {thing} to Norway?",
        "The package was open and the {thing} was gone.",
        # held out
        "The driver threw the parcel with the {thing} over the fence.",
        "Where is my {thing}? I ordered it two weeks ago.",
        "The delivery went to my old street, can the carrier bring it here?",
        "The {thing} is stuck at customs, says the carrier.",
    ),
    "account": (
        "I forgot my password and the mail to reset it does not come.",
        "Please change the e-mail address of my profile.",
        "I cannot log in since yesterday.",
        "How do I delete my profile and all of my data?",
        "Somebody else has signed in with my name.",
        "I want to switch on two-factor authentication.",
        "My name is misspelled in my profile.",
        "The sign-up form says that my user name is taken.",
        "My profile was locked after three wrong passwords.",
        "Please take me off your newsletter.",
        "I have two logins, can you merge them?",
        "The code to sign in never reaches my phone.",
        # held out
        "The page says that my user name or password is wrong, but they are right.",
        "I want to close my membership and have my data erased.",
        "I think that my login was hacked, I see devices that are not mine.",
        "How can I use another phone number for the security code?",
    ),
}
_LEARNED = 12
THINGS = (
    "headphones", "coffee machine", "camera", "smart watch", "vacuum cleaner", "printer",
    "tablet", "speaker", "doorbell", "toothbrush", "keyboard", "lamp",
)  # fmt: skip
AMOUNTS = ("12 euros", "$49.99", "30 dollars", "£18", "89 euros", "$7")
OPENINGS = (
    "", "Hello, ", "Hi there! ", "Good morning. ", "Dear team, ",
    "This is the second time I write. ", "I like your shop, but ",
    "I bought a {thing} at your shop in May. ", "Sorry to bother you. ",
)  # fmt: skip
CLOSINGS = (
    "", " Thanks.", " Please help.", " My order is {order}.", " What can I do?", " Best, {name}",
    " I am waiting for your answer.", " This is really annoying!",
)  # fmt: skip
NAMES = ("Ann", "Carlos", "Mei", "Jonas", "Fatima", "Oleg", "Priya", "Tom")


@dataclass(frozen=True)
class Ticket:
    """A customer's message, and the department that has to read it."""

    id: str
    message: str
    department: Department


def tickets(split: Literal["train", "test"], count: int, seed: int = 0) -> list[Ticket]:
    """As many of each department, in an order drawn by the seed; no message comes twice."""
    drawn = random.Random(f"{split}:{seed}")
    made = _messages(split, drawn)
    found = [next(made) for _ in range(count)]
    return [
        Ticket(f"{split}-{seed}-{n}", message, department)
        for n, (department, message) in enumerate(found)
    ]


def _messages(
    split: Literal["train", "test"], drawn: random.Random
) -> Iterator[tuple[Department, str]]:
    seen: set[str] = set()
    part = slice(_LEARNED) if split == "train" else slice(_LEARNED, None)
    while True:
        round_of = list(DEPARTMENTS)
        drawn.shuffle(round_of)
        for department in round_of:
            message = _message(PROBLEMS[department][part], drawn)
            while message in seen:
                message = _message(PROBLEMS[department][part], drawn)
            seen.add(message)
            yield department, message


def _message(problems: tuple[str, ...], drawn: random.Random) -> str:
    opening, closing = drawn.choice(OPENINGS), drawn.choice(CLOSINGS)
    problem = drawn.choice(problems)
    if opening.endswith(", but "):
        problem = problem if problem.startswith("I ") else problem[0].lower() + problem[1:]
    return (opening + problem + closing).format(
        thing=drawn.choice(THINGS),
        amount=drawn.choice(AMOUNTS),
        order=f"{drawn.choice('ABCDE')}-{drawn.randint(1000, 9999)}",
        name=drawn.choice(NAMES),
    )
