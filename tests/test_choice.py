"One answer in the making, alone and as one of several: `Choice` and `generate`"
import math

import numpy as np
import pytest
import torch
from conftest import LLAMA, Watched, toy_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.processors import TemplateProcessing

from minigpt.engine import Engine, EngineConfig
from minigpt.kernels import PagedKVCache
from minigpt.kv_cache import Choice, KVCache, generate
from minigpt.sampling import BadLogits, SamplingParams, bad_sequences, logit_stages, logprobs_of, sample, uniform
from minigpt.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, train_bpe

settings.register_profile('fixed', derandomize=True, deadline=None, max_examples=100)
settings.load_profile('fixed')

BYTES, EOS = ByteTokenizer(), 0
A = BYTES.encode('the cup')

def choice_of(prompt=A, tokenizer=BYTES, max_seq_len=64, index=0, eos=EOS, **fields):
    return Choice(SamplingParams(**fields), prompt, max_seq_len, eos, tokenizer, index)

def sure(token_id, size=256):
    row = np.full(size, -9, np.float32)
    row[token_id] = 9
    return row

def noise(seed, size=256): return np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3

def spell(token_ids, **fields):
    "A greedy choice fed with sure rows until it ends: itself, and what is certain after each token"
    choice, texts = choice_of(**dict(max_tokens=60, temperature=0) | fields), []
    for token_id in token_ids:
        choice.accept(sure(token_id))
        texts.append(choice.text)
        if choice.finish_reason: break
    return choice, texts

def ending(choice): return choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason


# ---- how it ends
@pytest.mark.parametrize('token_ids, fields, expected', [
    ([65, 66, 0, 67], {}, ([65, 66, 0], 'AB', 'stop', None)), ([65, 66, 67], dict(stop_token_ids=[66]), ([65, 66], 'A', 'stop', 66)),
    ([65, 66, 67], dict(max_tokens=2), ([65, 66], 'AB', 'length', None)), ([65, 66], dict(max_tokens=1), ([65], 'A', 'length', None)),
    ([65, 0, 66], dict(max_tokens=3, ignore_eos=True), ([65, 0, 66], 'A\0B', 'length', None)), ([65, 0], dict(max_tokens=2), ([65, 0], 'A', 'stop', None)),
    ([65, 66, 67], dict(stop='BC'), ([65, 66, 67], 'A', 'stop', 'BC')), ([65, 66], dict(stop='BC', max_tokens=2), ([65, 66], 'AB', 'length', None)),
    ([65, 66, 67], dict(stop='BC', include_stop_str_in_output=True), ([65, 66, 67], 'ABC', 'stop', 'BC')),
    ([65, 66, 67], dict(stop='C', max_tokens=3), ([65, 66, 67], 'AB', 'stop', 'C')),
    ([65, 66, 67], dict(stop='C', stop_token_ids=[67]), ([65, 66, 67], 'AB', 'stop', 67)),
    ([65, 66, 65, 66, 65], dict(stop='AB', min_tokens=3), ([65, 66, 65, 66], 'AB', 'stop', 'AB')), ([65] * 60, dict(max_seq_len=10), ([65] * 3, 'AAA', 'length', None))])
def test_endings(token_ids, fields, expected):
    "Behaviours 37, 39 and 54"
    assert ending(spell(token_ids, **fields)[0]) == expected

def test_min_tokens_bans_the_end():
    "Behaviour 38: the model wants EOS at once, and gets it as the third token"
    row = noise(1)
    row[EOS], row[66] = 40, 30
    choice = choice_of(min_tokens=2, max_tokens=9, temperature=0, stop_token_ids=[66])
    while not choice.finish_reason: choice.accept(row)
    best = int(np.argsort(-row)[2])
    assert (choice.token_ids, choice.finish_reason) == ([best, best, EOS], 'stop')

@pytest.mark.parametrize('text, cuts', [('🙂', ['', '', '', '🙂']), ('né', ['n', 'n', 'né'])])
def test_no_half_character_is_shown(text, cuts):
    "Behaviour 55; a reply that ends inside a character shows U+FFFD for it"
    ids = BYTES.encode(text)
    assert spell(ids)[1] == cuts
    cut = spell(ids, max_tokens=len(ids) - 1)[0]
    assert cut.text == bytes(ids[:-1]).decode(errors='replace') and cut.finish_reason == 'length'

def test_a_stop_string_across_tokens_is_held_back():
    "Behaviours 52 and 54"
    assert spell(BYTES.encode('abDEFGH'), stop='DEFGHIJ')[1][-1] == 'ab'
    assert spell(BYTES.encode('abDEFGX'), stop='DEFGHIJ')[1][-1] == 'abDEFGX'
    assert spell(BYTES.encode('abDEF'), stop='DEFGHIJ', max_tokens=5)[0].text == 'abDEF'
    assert ending(spell(BYTES.encode('né!'), stop='é')[0])[1:] == ('n', 'stop', 'é')


# ---- what is asked of the rows
steering = st.fixed_dictionaries({}, optional=dict(
    presence_penalty=st.sampled_from([.5, -1., 2.]), frequency_penalty=st.sampled_from([.25, -.5, 2.]), repetition_penalty=st.sampled_from([1.2, .8, 3.]),
    logit_bias=st.dictionaries(st.integers(0, 255), st.floats(-100, 99, width=16), max_size=4), temperature=st.sampled_from([0., .7, 2.]),
    allowed_token_ids=st.lists(st.integers(0, 255), min_size=20, max_size=90), bad_words=st.lists(st.text('ab ', min_size=1, max_size=2), max_size=3),
    min_tokens=st.integers(0, 6), stop_token_ids=st.lists(st.integers(0, 255), max_size=2), top_k=st.sampled_from([0, 20])))

@given(steering, st.lists(st.integers(0, 255), min_size=1, max_size=9), st.integers(0, 9), st.integers(0, 3))
def test_each_token_depends_on_the_two_lists_alone(fields, prompt, seed, index):
    "Behaviours 49 and 51: a choice that went through everything equals one answer put together from nothing for each token"
    params = SamplingParams(n=4, seed=seed, max_tokens=12, ignore_eos=True, **fields)
    choice, tokens = Choice(params, prompt, 64, EOS, BYTES, index), []
    for i in range(12):
        row = noise(i % 3)  # the same few rows again and again, so that penalties bite
        stages = logit_stages(params, prompt, list(tokens), EOS, bad_sequences(params.bad_words, BYTES.encode))
        tokens.append(sample(row, params, uniform(seed, index, len(prompt) + i), stages))
        assert choice.accept(row) == tokens[-1]
        if choice.finish_reason: break
    assert choice.token_ids == tokens

def test_penalties_reach_the_row():
    "Behaviour 51: on the output; repetition on the prompt as well"
    row, (first, second, third) = noise(3), (98, 97, 99)
    row[[first, second, third]] = 20, 19, 18.5
    def greedy(n, prompt=A, **fields):
        choice = choice_of(prompt, temperature=0, **fields)
        return [choice.accept(row) for _ in range(n)]
    assert greedy(2) == [first, first]
    for fields in (dict(presence_penalty=2), dict(frequency_penalty=2), dict(repetition_penalty=10)): assert greedy(2, **fields)[1] != first
    assert greedy(1, [first], repetition_penalty=10) == [second] != greedy(1, [first], presence_penalty=2, frequency_penalty=2)
    assert greedy(1, logit_bias={str(first): -100}) == [second] and greedy(1, logit_bias={third: 100}) == [third]
    assert greedy(1, allowed_token_ids=[third, second]) == [second] and greedy(1, bad_words=['b']) == [second]

def test_logprobs_are_of_the_raw_row():
    "Behaviour 56, and −9999 at the least"
    row = noise(4)
    row[7] = -math.inf
    choice = choice_of(logprobs=0, temperature=0, logit_bias={9: 100}, repetition_penalty=2.)
    choice.accept(row)
    assert choice.logprobs == [logprobs_of(row, 9)] and choice.logprobs[0].top == ()
    choice = choice_of(logprobs=5, temperature=0, logit_bias={9: 100})
    choice.accept(row)
    assert choice.logprobs == [logprobs_of(row, 9, 5)] and len(choice.logprobs[0].top) == 5
    forced = choice_of(logprobs=20, allowed_token_ids=[7, 9], temperature=0)
    forced.accept(row)
    assert choice_of().logprobs == [] and all(math.isfinite(x) for _, x in forced.logprobs[0].top)

def test_a_bad_row_changes_nothing():
    "Behaviour 47: the choice that failed is as it was, and goes on as if the row had never come"
    choice, twin = (choice_of(seed=3, logprobs=1, frequency_penalty=1., stop='zz', n=2) for _ in range(2))
    for i in range(6):
        for row in (np.full(256, math.nan, np.float32), np.full(256, -math.inf, np.float32)):
            before = list(choice.token_ids), choice.text, list(choice.logprobs), choice.finish_reason
            with pytest.raises(BadLogits): choice.accept(row)
            assert before == (choice.token_ids, choice.text, choice.logprobs, choice.finish_reason)
        assert choice.accept(noise(i)) == twin.accept(noise(i))
    assert choice.logprobs == twin.logprobs

@pytest.mark.parametrize('fields, message', [
    (dict(logit_bias={256: 1}), 'logit_bias has token id 256, it must be at most 255'), (dict(allowed_token_ids=[3, 999999]), 'allowed_token_ids has token id 999999'),
    (dict(stop_token_ids=[256]), 'stop_token_ids has token id 256'), (dict(n=2, index=2), 'index=2 must be from 0 to 1, as n=2'),
    (dict(index=1), 'index=1'), (dict(index=-1), 'index=-1'),
    (dict(tokenizer=None, stop=['a', 'b']), '2 stop strings need a tokenizer'), (dict(tokenizer=None, bad_words=['a']), '1 bad words need a tokenizer')])
def test_refused(fields, message):
    "Behaviour 48"
    with pytest.raises(ValueError, match=message): choice_of(**fields)

def test_ids_are_checked_without_a_tokenizer_too():
    model = toy_model(**LLAMA)
    for params in (SamplingParams(logit_bias={256: 1}), SamplingParams(allowed_token_ids=[256])):
        with pytest.raises(ValueError, match='has token id 256, it must be at most 255'): generate(model, A, params)
    assert generate(model, A, SamplingParams(max_tokens=3, logit_bias={255: 100})).token_ids == [255] * 3

def test_rows_without_a_token_are_never_chosen_nor_named():
    "A model may have more rows than its tokenizer has tokens, and a prompt may not name them"
    chars = CharTokenizer('abc')
    row = np.array([0, 1, 2, 90, 91], dtype=np.float32)
    choice = choice_of([0, 1], chars, eos=None, logprobs=5, prompt_logprobs=5, repetition_penalty=1.5, temperature=0)
    assert choice.accept(row) == 2
    choice.accept_prompt_rows(np.stack([row, row]), 0)
    for report in (choice.logprobs[0], choice.prompt_logprobs[1]): assert [i for i, _ in report.top] == [2, 1, 0]
    assert choice.logprobs[0].logprob == pytest.approx(row.astype(float)[2] - np.logaddexp.reduce(row.astype(float)))

def test_bad_words_leave_out_what_a_tokenizer_puts_first():
    raw = train_bpe(['the cat sat on the mat, the cat ate'] * 3, 290)
    plain = BPETokenizer(HFTokenizer.from_str(raw.to_str()))
    raw.post_processor = TemplateProcessing(single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', 0)])
    tokenizer = BPETokenizer(raw)
    assert tokenizer.encode('cat')[0] == 0
    for word in ('cat', ' cat', 'the cat'):
        choice = choice_of([5], tokenizer, bad_words=[word])
        bare = word.lstrip()
        assert choice.bad_sequences == [(ids[:-1], ids[-1]) for ids in (plain.encode(bare), plain.encode(' ' + bare))]
    assert choice_of([2], CharTokenizer('abc'), bad_words=['é', 'ab'], eos=None).bad_sequences == [([0], 1)]

def test_the_prompt_is_the_choices_own_copy():
    prompt, row = [3], noise(1)
    choice = choice_of(prompt, repetition_penalty=10, seed=1)
    prompt += range(256)
    assert choice.accept(row) == choice_of([3], repetition_penalty=10, seed=1).accept(row)

def test_no_token_costs_more_than_the_one_before():
    "Nothing in `accept` reads all tokens so far"
    everything = dict(repetition_penalty=1.5, frequency_penalty=.5, presence_penalty=.5, bad_words=['ab', 'xyz'], min_tokens=3, stop=['qq'], logprobs=2)
    for fields in ({}, dict(temperature=0), everything):
        choice = choice_of(max_seq_len=999, max_tokens=300, ignore_eos=True, **fields)
        choice.token_ids = Watched()
        choice.stages = logit_stages(choice.params, choice.prompt_token_ids, choice.token_ids, EOS, choice.bad_sequences)
        for i in range(300):
            choice.token_ids.read.clear()
            choice.accept(noise(i % 5))
            assert sum(choice.token_ids.read) <= 12


# ---- several choices of one request
FORKED = [dict(seed=5), dict(), dict(seed=5, temperature=.5, frequency_penalty=.7, logprobs=2),
          dict(seed=2, bad_words=['a'], stop='zz', min_tokens=2, logit_bias={7: 5})]

@pytest.mark.parametrize('fields', FORKED)
def test_a_fork_is_the_choice_that_index_makes(fields):
    "Behaviours 41 and 50"
    zero = choice_of(n=4, max_tokens=12, **fields)
    choices = [zero, *(zero.fork(i) for i in (1, 2, 3))]
    alone = [choice_of(n=4, max_tokens=12, index=i, **fields | dict(seed=zero.seed)) for i in range(4)]
    for step in range(12):
        for i in ((0, 1, 2, 3), (3, 1, 0, 2))[step % 2]:  # whoever comes first
            if not choices[i].finish_reason: choices[i].accept(noise(step))
            if not alone[i].finish_reason: alone[i].accept(noise(step))
    for fork, made in zip(choices, alone): assert (*ending(fork), fork.logprobs, fork.seed, fork.index) == (*ending(made), made.logprobs, made.seed, made.index)
    assert len({tuple(c.token_ids) for c in choices}) == 4

def test_three_choices_of_seed_5():
    "Behaviour 50 and fault 10: three distinct; choice 0 is that of n=1; choice 1 is not choice 0 of seed 6"
    model = toy_model(**LLAMA)
    def tokens(index=0, **fields): return generate(model, A, SamplingParams(max_tokens=12, temperature=2, **fields), tokenizer=BYTES, index=index).token_ids
    three = [tokens(i, n=3, seed=5) for i in range(3)]
    assert len(set(map(tuple, three))) == 3
    assert three[0] == tokens(seed=5) and three[1] != tokens(seed=6) and three == [tokens(i, n=3, seed=5) for i in range(3)]

def test_forks_share_what_does_not_change_and_nothing_else():
    calls = []
    class Counting(ByteTokenizer):
        def encode(self, text):
            calls.append(text)
            return super().encode(text)
    zero = choice_of(tokenizer=Counting(), n=64, bad_words=['ab', 'x'], prompt_logprobs=1)
    forks = [zero.fork(i) for i in range(1, 64)]
    assert calls == ['ab', ' ab', 'x', ' x']
    assert {c.seed for c in forks} == {zero.seed}
    zero.accept_prompt_rows(np.stack([noise(i) for i in range(7)]), 0)
    assert all(c.prompt_logprobs is zero.prompt_logprobs and len(c.prompt_logprobs) == 7 for c in forks)
    forks[0].accept(sure(65))
    assert (forks[0].token_ids, forks[0].text) == ([65], 'A') and all((c.token_ids, c.text) == ([], '') for c in [zero, *forks[1:]])

def test_a_fork_after_the_first_token_is_refused():
    choice = choice_of(n=3)
    for index in (-1, 3):
        with pytest.raises(ValueError, match=f'index={index} must be from 0 to 2, as n=3'): choice.fork(index)
    choice.accept(noise(0))
    with pytest.raises(ValueError, match='choice 0 has 1 tokens, a fork needs one with 0'): choice.fork(1)
    assert (choice.index, len(choice.token_ids)) == (0, 1)

def test_unseeded_requests_differ_and_their_choices_do_not_meet():
    "Behaviour 50 and fault 9"
    first, second = choice_of(n=2), choice_of(n=2)
    assert first.seed != second.seed and first.fork(1).seed == first.seed
    choices = [first, first.fork(1), second, second.fork(1)]
    rows = [np.zeros(256, np.float32)] * 8
    assert len({tuple(c.accept(row) for row in rows) for c in choices}) == 4


# ---- the prompt's logprobs
ROWS = np.stack([noise(i) for i in range(len(A))])

def prompt_choice(**fields): return choice_of(**dict(prompt_logprobs=3) | fields)

@given(st.lists(st.integers(1, 7), min_size=1, max_size=7), st.integers(0, 7))
def test_prompt_rows_in_any_pieces(sizes, again):
    "Behaviours 57 and 59: in pieces, in ones, some twice after a preemption, with or without the last row"
    choice, start = prompt_choice(), 0
    for size in sizes + [7]:
        if start < len(A): choice.accept_prompt_rows(ROWS[start:start + size], start)
        start = min(start + size, len(A))
        if again < start: choice.accept_prompt_rows(ROWS[again:start + 1], again)  # known rows, and perhaps one more
    assert choice.prompt_logprobs == [None, *(logprobs_of(ROWS[i], A[i + 1], 3) for i in range(len(A) - 1))]

def test_prompt_rows_have_bounds():
    choice = prompt_choice()
    assert choice.prompt_logprobs == [None] and choice_of().prompt_logprobs is None
    choice.accept_prompt_rows(ROWS[:0], 0)
    choice.accept_prompt_rows(ROWS[:2], 0)
    with pytest.raises(ValueError, match='begin at position 3, the next one needed is 2'): choice.accept_prompt_rows(ROWS[3:], 3)
    broken = ROWS.copy()
    broken[4, 9] = math.nan
    before = list(choice.prompt_logprobs)
    with pytest.raises(BadLogits, match='1 of 256 logits are NaN'): choice.accept_prompt_rows(broken[2:], 2)
    assert choice.prompt_logprobs == before and len(before) == 3
    choice.accept_prompt_rows(ROWS[:1], 0)
    assert choice.prompt_logprobs == before
    with pytest.raises(ValueError, match='prompt_logprobs=None asks for no rows'): choice_of().accept_prompt_rows(ROWS, 0)

@pytest.mark.parametrize('top, sizes', [(0, {0}), (5, {5}), (20, {20})])
def test_the_score_of_a_prompt_is_that_of_a_plain_forward_pass(top, sizes):
    "Behaviour 59; fp32 logits up to 40, two orders of summing"
    model, prompt = toy_model(max_seq_len=160, **LLAMA), BYTES.encode('the cat sat on the mat. ' * 6)
    logprobs = model(torch.tensor([prompt]))[0].double().log_softmax(-1)
    got = generate(model, prompt, SamplingParams(max_tokens=1, prompt_logprobs=top), tokenizer=BYTES).prompt_logprobs
    assert got[0] is None and [r.token_id for r in got[1:]] == prompt[1:] and {len(r.top) for r in got[1:]} == sizes
    assert sum(r.logprob for r in got[1:]) == pytest.approx(sum(logprobs[i, t].item() for i, t in enumerate(prompt[1:])), abs=1e-3)

@pytest.mark.parametrize('size', [1, 2, 63])
def test_asking_for_prompt_logprobs_changes_no_token(prepared, size):
    for model in prepared.values():
        prompt = [(7 * i) % 256 for i in range(size)]
        fields = dict(max_tokens=8, seed=4, logprobs=1)
        plain = generate(model, prompt, SamplingParams(**fields), tokenizer=BYTES)
        asked = generate(model, prompt, SamplingParams(prompt_logprobs=2, **fields), tokenizer=BYTES)
        assert (ending(plain), plain.logprobs) == (ending(asked), asked.logprobs)
        assert len(asked.prompt_logprobs) == size and plain.prompt_logprobs is None

def test_prompt_logprobs_are_the_same_bits_in_chunks(prepared):
    "Behaviour 59, as an engine would do it: the prompt cut anywhere, into blocks, logits of each piece alone"
    model, prompt, params = prepared['llama'], BYTES.encode('the cat sat on the mat.'), SamplingParams(max_tokens=4, prompt_logprobs=2, seed=1)
    with torch.inference_mode():
        whole = generate(model, prompt, params, PagedOne(model.config), BYTES)
        for size in (1, 4, 7):
            cache, choice = PagedOne(model.config), Choice(params, prompt, model.config.max_seq_len, None, BYTES)
            for start in range(0, len(prompt), size):
                positions = range(start, min(start + size, len(prompt)))
                cache.begin(positions)
                hidden = model.hidden(torch.tensor(prompt[start:positions.stop]), torch.tensor(positions), cache)
                choice.accept_prompt_rows(model.logits(hidden).numpy(), start)
            assert choice.prompt_logprobs == whole.prompt_logprobs

class PagedOne:
    "A paged cache that holds one sequence"
    def __init__(self, config):
        self.cache = PagedKVCache(config, 16, 4)
        self.attend = self.cache.attend
    def begin(self, positions): self.cache.begin([list(range(16))], [positions])

def test_generate_takes_a_plain_cache_and_an_index():
    model = toy_model(**LLAMA)
    params = SamplingParams(n=2, seed=1, max_tokens=5)
    assert generate(model, A, params, KVCache(model.config), index=1).index == 1
    with pytest.raises(ValueError, match='index=2'): generate(model, A, params, index=2)

def test_preemption_changes_nothing(prepared):
    "Behaviours 49 and 51: many at once in a pool that is too small, with all that may be asked for, say what each says alone"
    records, prompts = [], [BYTES.encode(text) for text in ('the cup', 'the cat', 'cat', 'a much longer prompt', 'ab', 'the mat')]
    fields = [dict(repetition_penalty=1.5), dict(frequency_penalty=1., presence_penalty=.5), dict(logit_bias={101: 3, 0: -100}, logprobs=1),
              dict(bad_words=['e', 'th'], min_tokens=4), dict(allowed_token_ids=list(range(97, 123)), repetition_penalty=2.), {}]
    params = [SamplingParams(seed=i, max_tokens=30, **f) for i, f in enumerate(fields)]
    engine = Engine(prepared['llama'], BYTES, EngineConfig(block_size=4, num_blocks=17, max_num_batched_tokens=9), records.append)
    for i, (prompt, p) in enumerate(zip(prompts, params)): engine.add(str(i), prompt, p)
    tokens = {str(i): [] for i in range(6)}
    while engine.has_work:
        for output in engine.step(): tokens[output.request_id] += output.token_ids
    assert sum(len(line['preempted']) for line in records if line['kind'] == 'step') > 3
    model = prepared['llama']
    for i, (prompt, p) in enumerate(zip(prompts, params)):
        assert tokens[str(i)] == generate(model, prompt, p, PagedOne(model.config), BYTES).token_ids
