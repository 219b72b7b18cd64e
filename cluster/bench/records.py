"""Record of one request of a load: when it was due and sent, when its pieces came, and how it ended. Plain data."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """Times are seconds from the beginning of the load."""

    session: int
    turn: int
    due_s: float
    """When it was to be sent. Latencies count from here: what waits on our side, waits as well."""
    sent_s: float = 0.0
    end_s: float = 0.0
    piece_s: list[float] = field(default_factory=list)
    """When each piece of output came. A piece has one token or several, as the server sends them."""
    silent_end_s: float = 0.0
    """When the output ended, where that came after its last piece: with a token that has no text."""
    num_output_tokens: int = 0
    num_prompt_tokens: int | None = None
    """As the server counted them; None if it does not say."""
    error: str | None = None
    """The kind of its failure; None: it was answered to the end."""
    message: str = ""
    is_cut: bool = False
    """It was in flight when the run was interrupted: it says nothing of the server."""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from when it was due."""
        return self.piece_s[0] - self.due_s if self.piece_s else None

    @property
    def e2e_s(self) -> float | None:
        """From when it was due to its last token."""
        return None if self.last_s is None else self.last_s - self.due_s

    @property
    def last_s(self) -> float | None:
        """When the last token came; None: there was no output."""
        return max(self.piece_s[-1], self.silent_end_s) if self.piece_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None where there is none after it."""
        last_s = self.last_s
        if last_s is None or len(self.piece_s) < 2 or self.num_output_tokens < 2:
            return None
        return (last_s - self.piece_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Inter-token latencies: the gaps between pieces."""
        return [later - earlier for earlier, later in zip(self.piece_s, self.piece_s[1:], strict=False)]
