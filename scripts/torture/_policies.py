"""What no shipped policy does, for the sanitizers."""

POLICIES = {
    "prompt_blocks": "kv 1\nimport roco\npolicy PromptBlocks extends RoCo { prefill blocks of 7 }",
    "hard_blocks": "kv 1\nimport tova\npolicy HardBlocks extends TOVA { cap hard; storage blocks 5 }",
    "sparcas_blocks": "kv 1\nimport sparcas\npolicy SparCasBlocks extends SparCas { storage blocks 24 }",
    "quest_blocks": "kv 1\nimport quest\npolicy QuestBlocks extends Quest { storage blocks 7 }",
}
