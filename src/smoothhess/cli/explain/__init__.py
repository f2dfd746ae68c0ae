"""`smoothhess explain`: pages, figures and tables from the files of a model and of its inputs.

state_dict_files, exported_models, model_factories   weights, torch.export files, pkg.module:factory; no unpickling
  → size_formulas       the symbolic sizes of an export, which torch evaluates
  → load_model          --model, --weights and --output: a function from inputs to one tensor of outputs
  → model_hash          a hash of the model: results of another model are not reused
  → normalization       normalisation and standardised columns as part of the explained function
  → csv_files, image_files, npy_files, token_files      one kind of input file each
  → inputs              --input and --tokens: the examples, in the units in which noise is added
  → target_class        --target and --classes
  → example_question    an example with its target, its groups and the scale of the noise
  → output_files        the files of one explanation
  → folder_lock         one run at a time in a folder
  → output_folder       the content of --out; finished inputs are reused, files of others are not replaced
  → run_explain         the loop over inputs
option_values, checked_settings, explain_command     the options, their checks and their help, without torch
printed_summary                                      the printed text
"""
