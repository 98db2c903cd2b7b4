"""Keys of verl's `data` section."""

from __future__ import annotations

from scalerl.extras.verl.keys.entry import absent, renamed, same, written_by_user
from scalerl.extras.verl.keys.vocabulary.words import MODEL, NONE, OFF, PROGRAM, TURNS

DATA = [
    renamed(
        "data.trust_remote_code",
        f"{MODEL}.trust_remote_code",
        neutral=(False, None),
        why="the tokenizer is the model's",
    ),
    same("data.return_raw_chat", True, why="prompts stay lists of messages until they are tokenized, once"),
    same("data.return_(raw_input_ids|full_prompt)", False, why="a sample has its token ids and its messages"),
    same("data.return_multi_modal_inputs", why="prompts are text"),
    same("data.dataloader_num_workers", why="prompts are read and tokenized before the first step"),
    same("data.val_batch_size", why="all prompts of a validation go to the servers at once"),
    same("data.validation_shuffle", False, why="a validation is scored whole; its order changes nothing"),
    absent("data.tokenizer", *NONE, why="the tokenizer is the one in the model's directory"),
    absent("data.use_shm", *OFF, why="files are read from where they are, once"),
    renamed("data.seed", "data.seed", only=(None,), convert=lambda _: 42, why="the default"),
    renamed("data.gen_batch_size", "data.gen_batch_size", only=(None,), convert=lambda _: "${data.train_batch_size}"),
    same("data.(video_key|audio_key|image_patch_size)", why="prompts are text; one with images is refused by its row"),
    renamed("data.apply_chat_template_kwargs(.**|)", r"data.chat_template_kwargs\1"),
    absent("data.mm_processor_kwargs", {}, None, why="prompts are text"),
    absent("data.mm_processor_kwargs.**", why="prompts are text"),
    absent(
        "data.sampler.(class_path|class_name)",
        None,
        why="prompts come in the order of data.shuffle and data.seed",
        instead="leave it out, or give a dataset of your own in data.custom_cls",
    ),
    absent("data.datagen.(path|name)", None, why="data is prepared before a run (scalerl data)"),
    written_by_user("data.tool_config_path", *NONE, key=PROGRAM, what="program", why=TURNS),
    renamed("data.hf_dataset_path", "data.train_files"),
]
