"""The rule by which ``waybill.moe.even_experts`` chooses copies of hot experts: its specification.

To be read, copied and compared; the C++ planner gives the same, bit for bit. R ranks hold E / R
home experts each, and ``spare`` slots for copies. A plan says which expert each slot holds and how
many rows it takes. Aims: few rows on the fullest rank, few weights that it and that nodes send.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

RUNGS = 32
Copy = tuple[int, int]  # rank, expert
Table = list[list[int]]
#: Whether present copies are used again, the sender spread, an expert taken whole: in this order.
WAYS = ((True, True, False), (False, True, False), (False, False, False), (False, False, True))


def lower_bound(loads: Sequence[int], num_ranks: int, spare: int) -> int:
    """No plan's fullest rank has fewer rows.

    The mean is one bound. The k fullest ranks are another: others take spare * (R - k) experts.
    """
    homes = len(loads) // num_ranks
    ranks = [loads[r * homes : (r + 1) * homes] for r in range(num_ranks)]
    ranks.sort(key=sum, reverse=True)
    bound = -(-sum(loads) // num_ranks)
    for k in range(1, num_ranks):
        experts = sorted((rows for rank in ranks[:k] for rows in rank), reverse=True)
        bound = max(bound, -(-sum(experts[spare * (num_ranks - k) :]) // k))
    return bound


class Pass:
    """One try to bring every rank down to ``limit`` rows."""

    def __init__(self, limit: int, loads: Sequence[int], num_ranks: int, spare: int,
                 min_rows: int, alignment: int, present: set[Copy], nodes: int = 1):  # fmt: skip
        self.limit, self.min_rows, self.alignment = limit, min_rows, alignment
        self.homes = len(loads) // num_ranks
        self.ranks, self.node_ranks = range(num_ranks), num_ranks // nodes
        self.home_rows = list(loads)  # rows that an expert's home keeps
        self.load = [sum(loads[r * self.homes : (r + 1) * self.homes]) for r in self.ranks]
        self.free, self.sent = [spare] * num_ranks, [0] * num_ranks  # weights that a rank sends
        self.spare, self.present, self.copies = spare, present, Counter[Copy]()

    def give(self, expert: int, rank: int, rows: int) -> None:
        home = expert // self.homes
        self.home_rows[expert] -= rows
        self.load[home] -= rows
        self.load[rank] += rows
        if (rank, expert) not in self.copies:
            self.free[rank] -= 1
            self.sent[home] += (rank, expert) not in self.present
        self.copies[rank, expert] += rows

    def reuse(self) -> None:
        """Fills copies that are present: first those that settle a rank with no other such copy.

        The last slot of a rank is used only if that fills the rank. An only slot takes more than
        home has too much, while home's is free: home may become a receiver.
        """
        used: set[Copy] = set()
        while True:
            sizes: dict[Copy, int] = {}
            for rank, expert in sorted(self.present - used):
                home, room = expert // self.homes, self.limit - self.load[rank]
                excess = self.load[home] - self.limit
                most = room if excess > 0 and self.spare == self.free[home] == 1 else excess
                size = min(self.home_rows[expert], room, most)
                if size >= max(1, self.min_rows) and (self.free[rank] > 1 or size == room):
                    sizes[rank, expert] = size
            if not sizes:
                return
            of_home = Counter(expert // self.homes for _, expert in sizes)
            of_rank, order = Counter(rank for rank, _ in sizes), []
            for (rank, expert), size in sizes.items():
                home = expert // self.homes
                settles = of_rank[rank] == 1 and size == self.limit - self.load[rank]
                settles |= of_home[home] == 1 and size == self.load[home] - self.limit
                order.append((not settles, -size, rank, expert))
            _, less, rank, expert = min(order)
            self.give(expert, rank, -less)
            used.add((rank, expert))

    def settle(self, spread: bool, whole: bool, near: bool = False) -> bool:
        """Gives rows of ranks above the limit to the emptiest ranks; False where that ends early.

        ``spread``: the rank gives next that will have sent most weights, else the fullest;
        ``whole``: a rank with several free slots takes an expert that fits, else the largest;
        ``near``: a rank takes on a node that has the expert, if one there has room enough.
        """
        while True:
            above = [r for r in self.ranks if self.load[r] > self.limit]
            if not above:
                return True
            below = [r for r in self.ranks if self.free[r] > 0 and self.load[r] < self.limit]
            if not below:
                return False
            takers = sorted(below, key=lambda r: (self.load[r], r))
            taker = takers[0]
            room = self.limit - self.load[taker]
            giver = max(above, key=lambda r: (spread * self.sent[r] * room + self.load[r], -r))
            excess = self.load[giver] - self.limit
            experts = range(giver * self.homes, (giver + 1) * self.homes)
            expert = max(experts, key=lambda e: (self.home_rows[e], -e))
            if near:
                taker = self.nearer(takers, expert, min(self.home_rows[expert], room, excess))
                room = self.limit - self.load[taker]
            if whole and self.free[taker] > 1 and excess > room:
                fitting = [e for e in experts if 0 < self.home_rows[e] <= room]
                expert = max(fitting, key=lambda e: (self.home_rows[e], -e), default=expert)
            rows = self.share(self.home_rows[expert], room, excess, giver, taker)
            if rows == 0:
                return False
            self.give(expert, taker, rows)

    def nearer(self, takers: list[int], expert: int, rows: int) -> int:
        """The emptiest on the nodes of the expert, if that has room for 7/8 of ``rows``."""
        holders = [expert // self.homes, *(rank for rank, e in self.copies if e == expert)]
        nodes = {rank // self.node_ranks for rank in holders}
        near = next((r for r in takers if r // self.node_ranks in nodes), takers[0])
        return near if self.limit - self.load[near] >= rows - rows // 8 else takers[0]

    def share(self, rows: int, room: int, excess: int, giver: int, taker: int) -> int:
        """How many of an expert's rows a copy takes; 0: none."""
        most = min(rows, room)
        wanted = most if self.free[taker] == 1 and self.free[giver] > 0 else min(most, excess)
        wanted = max(wanted, min(self.min_rows, most))
        if wanted < rows:
            up = -(-wanted // self.alignment) * self.alignment
            wanted = up if up <= most else wanted // self.alignment * self.alignment
        return wanted if wanted >= self.min_rows else 0

    def send_home(self) -> None:
        """Copies go home while home has room: new ones before present ones, smallest first."""
        order = sorted(self.copies, key=lambda c: (c in self.present, self.copies[c], c[1], c[0]))
        for rank, expert in order:
            home, rows = expert // self.homes, self.copies[rank, expert]
            if self.load[home] + rows <= self.limit:
                self.give(expert, rank, -rows)
                del self.copies[rank, expert]


def choose_copies(loads: Sequence[int], num_ranks: int, spare: int, present: Iterable[Copy] = (),
                  min_rows: int = 0, limit: float = 1.0, alignment: int = 1, num_nodes: int = 1,
                  ) -> tuple[dict[Copy, int], int]:  # fmt: skip
    """{(rank, expert): rows} of the copies, and the lower bound.

    Limits grow from the bound to the fullest rank; at each, four ways are tried, each near first.
    The first try that brings all ranks below the limit is taken.
    """
    bound, lying = lower_bound(loads, num_ranks, spare), set(present)
    base = int(bound * limit)
    fullest = max(Pass(base, loads, num_ranks, spare, min_rows, alignment, lying).load)
    for rung in range(RUNGS):
        rows = base + max(fullest - base, 0) * rung**3 // (RUNGS - 1) ** 3
        for (reuse, spread, whole), near in product(WAYS, [True, False][num_nodes == 1 :]):
            tried = Pass(rows, loads, num_ranks, spare, min_rows, alignment, lying, num_nodes)
            if reuse:
                tried.reuse()
            if tried.settle(spread, whole, near):
                tried.send_home()
                return tried.copies, bound
    raise AssertionError("the last limit needs no copy")


def fill_slots(copies: dict[Copy, int], num_ranks: int, num_experts: int, spare: int,
               present: Table) -> Table:  # fmt: skip
    """[R][E / R + spare] experts: a present copy keeps its slot; it stays, unused, until a new copy
    needs the slot. New copies, by expert, take empty slots first."""
    homes = num_experts // num_ranks
    slots = []
    for rank in range(num_ranks):
        row = list(present[rank]) if present else [-1] * spare
        new = sorted(expert for r, expert in copies if r == rank and expert not in row)
        free = [s for s in range(spare) if (rank, row[s]) not in copies]
        free.sort(key=lambda s: row[s] >= 0)
        for expert, place in zip(new, free):
            row[place] = expert
        slots.append([*range(rank * homes, (rank + 1) * homes), *row])
    return slots


def share_rows(rows: Table, slots: Table, copies: dict[Copy, int]) -> tuple[Table, Table, Table]:
    """Per slot: quota, rows of its own rank, and the first of the other rows of its expert."""
    quotas = [[copies.get((r, e), 0) for e in row] for r, row in enumerate(slots)]
    homes = len(rows[0]) // len(rows)
    for expert in range(len(rows[0])):
        taken = sum(n for (_, e), n in copies.items() if e == expert)
        quotas[expert // homes][expert % homes] = sum(row[expert] for row in rows) - taken
    local = [[0 if e < 0 else min(quotas[r][s], rows[r][e]) for s, e in enumerate(row)]
             for r, row in enumerate(slots)]  # fmt: skip
    first, next_row = [[0] * len(row) for row in slots], [0] * len(rows[0])
    for r, row in enumerate(slots):
        for s, expert in enumerate(row):
            if quotas[r][s] > 0:
                first[r][s] = next_row[expert]
                next_row[expert] += quotas[r][s] - local[r][s]
    return quotas, local, first
