"""The command line's flags are those of the declarations, though help is shown without them."""

from dataclasses import fields

from holdfast.cluster.commands.sampling_flags import SamplingFlags
from holdfast.cluster.config.config import HoldfastConfig
from holdfast.cluster.config.flags import PATH, flag_table
from holdfast.cluster.config.sources import is_secret, leaves
from holdfast.worker.sampling_params import PARAMETERS
from scripts.flag_table import table


def test_the_table_is_that_of_the_declarations():
    assert PATH.read_text(encoding="utf-8") == table(), "run `python -m scripts.flag_table`"


def test_every_setting_that_is_no_secret_has_a_flag_of_its_own():
    settings = {path for path, field in leaves(HoldfastConfig) if not is_secret(field)}
    flags = flag_table().settings
    assert {flag.path for flag in flags} == settings
    assert len({flag.name for flag in flags}) == len(flags)
    assert "client.api_key" not in settings


def test_a_parameter_without_a_flag_has_several():
    without = PARAMETERS.keys() - {field.name for field in fields(SamplingFlags)}
    assert without == {"structured_outputs"}
