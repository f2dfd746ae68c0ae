"""`smoothhess explain`: from the files of a model and of inputs to pages, figures and tables.

state_dicts, exports, factories   weights, torch.export files, pkg.module:factory; nothing is unpickled
  → models        --model, --weights and --output: a function from inputs to outputs
  → identity      which model it is: results of another one are not kept
  → affine        normalisation and standardised columns as a part of the explained function
  → tables, pictures, arrays      one kind of input file each
  → examples      --input: what is explained, in the units in which noise is added
  → targets       --target and --classes
  → question      an example with everything that is asked about it
  → writing       the files of one explanation
  → folder        what lies in --out; finished inputs are kept
  → explanation   one input after the other
settings, command, telling        the options, their help, and what is printed
"""

from smoothhess.cli.explain.checked_settings import Settings
from smoothhess.cli.explain.run_explain import run

__all__ = ["Settings", "run"]
