"""Pages by number: free, held, idle."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flexdecode.attention.pool import Pool


def test_the_lowest_free_page_comes_first_and_idle_ones_last() -> None:
    pool = Pool(4)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]
    for page in (1, 2):
        pool.name(page, f"page {page}")
    for page in (2, 3, 1, 0):
        pool.drop(page)
    assert (pool.free, pool.idle) == (4, 2)
    assert [pool.take() for _ in range(3)] == [0, 3, 2]  # 2 was let go before 1
    assert pool.find("page 2") is None
    assert pool.find("page 1") == 1
    pool.hold(1)
    assert (pool.free, pool.idle) == (0, 0)


def test_a_name_stands_for_one_page_and_a_page_for_one_name() -> None:
    pool = Pool(3)
    for _ in range(3):
        pool.take()
    pool.name(0, "a")
    pool.name(1, "a")
    pool.name(0, "b")
    assert (pool.find("a"), pool.find("b")) == (0, None)
    pool.drop(1)
    assert (pool.free, pool.idle) == (1, 0)  # it never got a name
    pool.forget(0)
    pool.drop(0)
    assert (pool.free, pool.idle) == (2, 0)
    pool.forget(0)


class PoolMachine(RuleBasedStateMachine):
    """Against lists: who holds what, and in which order idle pages were let go."""

    @initialize(pages=st.integers(1, 6))
    def start(self, pages: int) -> None:
        self.pool, self.pages = Pool(pages), pages
        self.held: list[int] = []
        self.names: dict[int, str] = {}
        self.idle: list[int] = []

    @precondition(lambda self: len(set(self.held)) < self.pages)
    @rule()
    def take(self) -> None:
        page = self.pool.take()
        assert page not in self.held
        unnamed = set(range(self.pages)) - set(self.held) - set(self.idle)
        assert page == (min(unnamed) if unnamed else self.idle[0])
        if not unnamed:
            self.idle.remove(page)
            del self.names[page]
        self.held.append(page)

    @precondition(lambda self: self.held or self.idle)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({*self.held, *self.idle})))
        self.pool.hold(page)
        self.held.append(page)
        self.idle = [p for p in self.idle if p != page]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held))
        self.pool.drop(page)
        self.held.remove(page)
        if page not in self.held and page in self.names:
            self.idle.append(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from("abc"))
    def name(self, data: st.DataObject, name: str) -> None:
        page = data.draw(st.sampled_from(self.held))
        self.pool.name(page, name)
        if name not in self.names.values():
            self.names.setdefault(page, name)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held))
        self.pool.forget(page)
        self.names.pop(page, None)

    @invariant()
    def all_agrees(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.free == self.pages - len(set(self.held))
            assert self.pool.idle == len(self.idle)
            assert [self.pool.references(p) for p in range(self.pages)] == [
                self.held.count(p) for p in range(self.pages)
            ]
            pages = {name: page for page, name in self.names.items()}
            assert [self.pool.find(name) for name in "abc"] == [pages.get(name) for name in "abc"]


PoolMachine.TestCase.settings = settings(deadline=None, max_examples=60)
TestPoolMachine = PoolMachine.TestCase
