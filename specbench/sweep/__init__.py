"""Batch sizes x depths x methods: a sweep is a folder of ordinary runs, one for each batch size."""
