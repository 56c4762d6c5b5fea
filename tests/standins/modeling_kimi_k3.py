"""Kimi-K3's outer model without its vision tower: the text model under ``language_model``."""

from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from .configuration_kimi_k3 import KimiK3Config
from .fla_like import chunk_kda  # noqa: F401 (transformers 4.57 copies only the files that this one names)
from .modeling_kimi_linear import KimiLinearForCausalLM


class KimiK3ForConditionalGeneration(PreTrainedModel, GenerationMixin):
    config_class = KimiK3Config
    base_model_prefix = ""
    _no_split_modules = ["KimiDecoderLayer"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_flash_attn_2 = True
    _supports_sdpa = True
    _is_stateful = True

    def __init__(self, config: KimiK3Config):
        super().__init__(config)
        self.language_model = KimiLinearForCausalLM(config.text_config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Every module draws its own when it is made."""

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:
        self.language_model._prepare_cache_for_generation(*args, **kwargs)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.language_model.prepare_inputs_for_generation(*args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        return self.language_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
