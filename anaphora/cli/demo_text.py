"""The demo's prompts: a harbour's register as a long table, and short questions about it.

Knows nothing of engines. Every name is invented and every cell follows from the row number, so that the prompts are the
same everywhere.
"""

from __future__ import annotations

# fmt: off
_BOATS = (
    "Marigold", "Kestrel", "Juniper", "Thistle", "Halcyon", "Bramble", "Petrel", "Saffron", "Wren", "Larkspur",
    "Osprey", "Clover", "Merganser", "Sorrel", "Plover", "Tansy", "Curlew", "Yarrow", "Dunlin", "Bryony", "Fulmar",
    "Hazel", "Gannet", "Rowan", "Avocet", "Laurel", "Whimbrel", "Teasel", "Godwit", "Myrtle", "Sanderling",
    "Campion", "Turnstone", "Foxglove", "Redshank", "Comfrey", "Lapwing", "Verbena", "Bittern", "Lavender",
)
# fmt: on
_KINDS = ("ketch", "cutter", "trawler", "barge", "schooner", "yawl", "tug")
_SKIPPERS = (
    "Ida Holm",
    "Per Lund",
    "Nell Grace",
    "Tom Avery",
    "Una Brand",
    "Jon Vale",
    "Mae Stone",
    "Rolf Dane",
    "Eve Quill",
)
_CARGOES = ("barley", "timber", "slate", "salt", "wool", "copper", "apples", "glass", "rope", "lime", "tea")
_PORTS = ("Port Ember", "Greyhaven", "Saltmouth", "Norrick", "Elder Bay")
_HEADER = (
    "The harbour master keeps this register of the boats in the inner basin.\n\n"
    "| No | Boat | Kind | Skipper | Berth | Length (m) | Cargo | Last port | Arrived |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)

FULL_TABLE = len(_BOATS)
"""Rows of the whole register: about 1,700 of SmolLM2's tokens."""


def register(num_rows: int) -> str:
    """The first rows of the register as a markdown table, 1 to FULL_TABLE of them."""
    return _HEADER + "".join(_row(number) for number in range(num_rows))


def _row(number: int) -> str:
    cells = (
        number + 1,
        boat(number),
        _KINDS[number % len(_KINDS)],
        _SKIPPERS[number * 2 % len(_SKIPPERS)],
        f"{'ABCD'[number % 4]}{number * 7 % 30 + 1}",
        f"{9 + number * 5 % 17}.{number * 3 % 10}",
        _CARGOES[number * 4 % len(_CARGOES)],
        _PORTS[number % len(_PORTS)],
        f"{number * 11 % 30 + 1} May {number * 5 % 24:02}:{number * 13 % 60:02}",
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |\n"


def boat(number: int) -> str:
    """The name in row `number`, from 0."""
    return _BOATS[number]


def ask(table: str, name: str) -> str:
    """The whole prompt: the table, then a question about one boat and the beginning of its answer."""
    return f"{table}\nQuestion: Which cargo does the boat called {name} carry?\nAnswer: The boat {name} carries"


def unrelated(num_lines: int) -> str:
    """A text that shares no beginning with the register."""
    return "".join(
        f"Minute {line}: wind {line * 7 % 360} degrees, glass {980 + line % 40} hPa.\n" for line in range(num_lines)
    )
