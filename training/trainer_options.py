"""Which options of Lightning's Trainer a run takes. Each of them is in one of the three tables.

Needs neither torch nor Lightning, so that a mistake on the command line is answered before they are imported.
"""

# Passed on to Lightning. `resolve_trainer_options` checks values that Lightning would report late or unclearly.
TO_LIGHTNING = ("accelerator", "strategy", "devices", "num_nodes", "precision", "max_steps", "max_epochs")
TO_LIGHTNING += ("log_every_n_steps", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
TO_LIGHTNING += ("deterministic", "benchmark", "inference_mode", "detect_anomaly", "profiler")

# Implemented by this project (training/progress.py, data/batches.py); Lightning does not see them.
HANDLED_HERE = ("max_time", "min_steps", "min_epochs", "val_check_interval", "limit_train_batches", "limit_val_batches")
HANDLED_HERE += ("overfit_batches", "enable_progress_bar")

SUPPORTED_OPTIONS = TO_LIGHTNING + HANDLED_HERE

# Cannot be set; what to use instead.
_NO_LOOP = "A run only trains and validates. Use trainer.limit_val_batches."
REJECTED = {
    "check_val_every_n_epoch": "Use num_validations=5, or trainer.val_check_interval=100 for every 100 batches.",
    "fast_dev_run": "Use trainer.max_steps=1 for a short run.",
    "logger": "Use logger=csv or logger=[tensorboard,csv], without trainer.",
    "callbacks": "Add them in training/setup.py.",
    "plugins": "They are Python objects; add them in training/setup.py.",
    "default_root_dir": "Use runs_dir=DIRECTORY.",
    "enable_checkpointing": "A run always saves its best and its last checkpoint.",
    "num_sanity_val_steps": "For an early validation, use a larger num_validations.",
    "enable_model_summary": "train.py prints what it trains.",
    "barebones": "To measure speed, use python -m benchmarks.training_speed.",
    "limit_test_batches": _NO_LOOP,
    "limit_predict_batches": _NO_LOOP,
    "reload_dataloaders_every_n_epochs": "Batches depend only on the seed and the step.",
    "use_distributed_sampler": "Each device always gets its own batches.",
    "sync_batchnorm": "The networks have no batch normalization.",
    "enable_autolog_hparams": "Hyperparameters are always logged.",
    "model_registry": "Checkpoints are saved in the run directory.",
}
