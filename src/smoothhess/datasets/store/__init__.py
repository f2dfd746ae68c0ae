"""The folder that explanations of a data set are kept in: shards, manifest, records, running summary."""
