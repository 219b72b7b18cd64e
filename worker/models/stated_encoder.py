"""Parts of a layout that encoders alone have: learned positions, and norms that take the residual stream's place."""

from dataclasses import replace

from holdfast.worker.executors.layout import TokenPlaces
from holdfast.worker.executors.linears import Norm
from holdfast.worker.models.encoder import Encoder
from holdfast.worker.models.family import is_set
from holdfast.worker.models.rank_share import RankShare


class EncoderBuilder:
    """Builds them."""

    def __init__(self, share: RankShare, encoder: Encoder) -> None:
        self._share = share
        self._encoder = encoder
        self._base = share.family.base

    def places(self) -> TokenPlaces | None:
        """Rows that are added to embeddings. The first position is that of a prompt's first token."""
        encoder, config, share = self._encoder, self._share.config, self._share
        if encoder.positions is None or encoder.segments is None:
            return None
        first, count = getattr(config, "first_position", 0), config.max_position_embeddings
        shape, kinds = (first + count, config.hidden_size), (config.type_vocab_size, config.hidden_size)
        positions = share.tensors.take(f"{self._base}{encoder.positions}.weight", shape).narrow(0, first, count)
        segments = share.floats(share.tensors.take(f"{self._base}{encoder.segments}.weight", kinds))
        is_told_apart = encoder.has_second_segment and len(segments) > 1
        of_texts = segments[:2] if is_told_apart else segments[:1].repeat(2, 1)
        return TokenPlaces(positions=share.floats(positions), segments=of_texts)

    def attention_norm(self, index: int) -> Norm:
        """The norm before a layer's attention: that of the embedding, or, where norms stay, of the layer before."""
        encoder, family = self._encoder, self._share.family
        if index == 0:
            return replace(self._norm(encoder.embedding_norm), stays=True)
        own = index - 1 if encoder.norms_stay else index
        return replace(self._norm(f"{family.layers}{own}.{family.attention_norm}"), stays=encoder.norms_stay)

    def mlp_norm(self, index: int) -> Norm:
        """The norm before a layer's MLP: where norms stay, the one behind its attention."""
        family = self._share.family
        norm = self._norm(f"{family.layers}{index}.{family.mlp_norm}")
        return replace(norm, stays=self._encoder.norms_stay)

    def final_norm(self) -> Norm:
        """The norm behind the last layer: where norms stay, the one at its end."""
        family, last = self._share.family, self._share.config.num_hidden_layers - 1
        name = f"{family.layers}{last}.{family.attention_norm}" if self._encoder.norms_stay else family.final_norm
        return self._norm(name)

    def _norm(self, name: str) -> Norm:
        config, family = self._share.config, self._share.family
        return self._share.norm(self._base + name, (config.hidden_size,), has_bias=is_set(family.norm_bias, config))
