-- Fields of requests that the gate's filter checks, with their sentences. The reader is in guard.lua and guard_lists.lua, which follow
-- this file.
--
-- The lines before this file set SETTINGS: each limit by its name in spec.engine.limits, and customLogitProcessors if the engines accept
-- them; SAMPLING_TYPES: the type of each field of sampling_params; WRONG_TYPE: a sentence for each type; and WRONG_SAMPLING_PARAMS.

-- Sampling is done in 32 bits.
local LARGEST_K = 2147483647

-- Length of a list of adapters that is read.
local ADAPTERS_WINDOW = 4096

local LONGEST_NUMBER = 40

-- Length of the patterns of stop_regex that are read. SGLang takes 32 patterns of 256 bytes.
local PATTERNS_WINDOW = 65536

-- Refusals: sentences, with a code for programs.

local function refuse(self, code, sentence, ...)
  self.code = code
  return sentence:format(...)
end

local function unreadable(self, sentence, ...)
  return refuse(self, "unreadable_body", sentence, ...)
end

local function above(self, subject, number, limit)
  return refuse(
    self, "above_limit", "%s is %.14g, above the limit of %d; engine.limits.%s raises it.", subject, number, SETTINGS[limit], limit
  )
end

local function no_object(self)
  return unreadable(self, "The body is not a JSON object in UTF-8.")
end

local function more_than(self, subject, what, limit)
  return refuse(self, "above_limit", "%s has more than %d %s; engine.limits.%s raises it.", subject, SETTINGS[limit], what, limit)
end

local function written(word)
  return (word:gsub("[^%w_./:@ +-]", "?"):sub(1, 20))
end

local function is_empty(self, key)
  return refuse(self, "would_end_the_engine", "%s is empty: give at least one token.", key)
end

-- Counts. A request has as many samples as prompts times samples of each.

local function count_samples(self)
  local number = self.samples * self.prompts
  if number > SETTINGS.samplesPerRequest then
    return above(self, "The number of samples of all prompts", number, "samplesPerRequest")
  end
end

local function count_prompt(self, key)
  local number = (self.counts[key] or 0) + 1
  self.counts[key] = number
  if number <= self.prompts then
    return nil
  end
  self.prompts = number
  if number > SETTINGS.promptsPerRequest then
    return above(self, "The number of prompts in " .. key, number, "promptsPerRequest")
  end
  return count_samples(self)
end

-- Checks of numbers.

local function samples(self, key, number)
  if number > SETTINGS.samplesPerPrompt then
    return above(self, key, number, "samplesPerPrompt")
  end
  self.samples = math.max(self.samples, number)
  return count_samples(self)
end

local function number_of_logprobs(self, key, number)
  if self.vocabulary and number > self.vocabulary then
    return refuse(self, "would_end_the_engine", "%s is larger than the vocabulary of %d tokens.", key, self.vocabulary)
  end
  if number > SETTINGS.logprobsPerToken then
    return above(self, key, number, "logprobsPerToken")
  end
end

local function top_k(self, key, number)
  if number > LARGEST_K then
    return refuse(self, "would_end_the_engine", "%s is larger than %d; use -1 for the whole vocabulary.", key, LARGEST_K)
  end
end

local function logprob_start(self, key, number)
  if number < -1 then
    return refuse(self, "would_end_the_engine", "%s is below -1, which means the prompt's end.", key)
  end
end

-- Stop tokens outside the vocabulary are harmless, and used, until SGLang has to suppress them.
local function least_tokens(self, _, number)
  self.suppresses = self.suppresses or number > 0
  if self.suppresses and self.stop_sentence then
    return refuse(self, "would_end_the_engine", "%s", self.stop_sentence)
  end
end

-- A value for each prompt. SGLang reads a list in a request with one prompt as one value.
local function for_each_prompt(self, text, value, key)
  if self.depth == 1 and text:byte(value) == 91 then -- [
    self.listed = key
  end
  return value
end

local function any_number() end

-- A word of JSON that stands for a number. SGLang also reads strings, fractions and exponents as whole numbers.
local function check_number(self, key, word, check)
  if word == "null" or word == "true" or word == "false" then
    return nil
  end
  local number = #word < LONGEST_NUMBER and word:find("^%-?%d") and tonumber(word)
  if not number then
    return unreadable(self, "%s is %s: write a number.", key, written(word))
  end
  return check(self, key, number)
end

-- Fields. `read` gets the text, the place of the value, and the key. It returns the place to continue at, or nil and a sentence, or nil
-- alone if the value continues in the next piece.

local function number(check)
  return function(self, text, value, key)
    if text:byte(value) == 91 then -- [
      self.list = { key = key, check = check, nest = 0 }
      self.listed = self.depth == 1 and key or self.listed
      return value
    end
    local word, after = text:match("^([^,%s%]}]*)()", value)
    if after > #text and #word < LONGEST_NUMBER then
      return nil
    end
    local sentence = check_number(self, key, word, check)
    if sentence then
      return nil, sentence
    end
    return value
  end
end

-- A number in sampling_params, whose types SGLang's HTTP server does not check. The values of other fields are checked there.
local function sampling_number(self, text, value, key)
  if self.depth == 1 then
    return value
  end
  return number(any_number)(self, text, value, key)
end

-- Characters with which values of the types of sampling_params begin, also null. A number is read as a whole.
local STARTS = {
  bias = "^[{n]", boolean = "^[tfn]", number = "^[^%[]", object = "^[{n]", text = '^["n]', texts = '^["%[n]', tokens = "^[%[n]",
}

-- The type of a field of sampling_params. Returns the sentence of a refusal.
local function check_type(self, text, value, key)
  local kind = SAMPLING_TYPES[key]
  if kind and not text:find(STARTS[kind], value) then
    return unreadable(self, WRONG_TYPE[kind], key)
  end
  if kind == "texts" and key ~= "stop_regex" and text:byte(value) == 91 then -- [
    self.texts = { key = key }
  end
end

-- A value of logit_bias.
local function bias(self, text, value)
  local word, after = text:match("^([^,%s%]}]*)()", value)
  if after > #text and #word < LONGEST_NUMBER then
    return nil
  end
  if #word < LONGEST_NUMBER and word:find("^%-?%d") and tonumber(word) then
    return value
  end
  return nil, unreadable(self, WRONG_TYPE.bias, "logit_bias")
end

local function sampling_params(self, text, value)
  if text:find("^[{%[n]", value) then
    return value
  end
  return nil, unreadable(self, "%s", WRONG_SAMPLING_PARAMS)
end

-- The place of the bracket that ends a class of characters; nil if there is none.
local function class_end(pattern, at)
  at = pattern:match("^%[%^?%]?()", at)
  while true do
    local place = pattern:find("[\\%]]", at)
    if not place or pattern:byte(place) == 93 then -- ]
      return place
    end
    at = place + 2
  end
end

-- Count what a pattern of stop_regex repeats. Returns nil for a pattern whose match may take exponential time: groups that are repeated or
-- that have alternatives, references, and all that begins with (?, which can also change how a pattern is read.
local function repetitions(pattern)
  local number, depth, at, after_group = 0, 0, 1, false
  while at <= #pattern do
    local sign, group = pattern:sub(at, at), after_group
    local repeated = pattern:match("^[*+?]()", at) or pattern:match("^{%d*,?%d*}()", at)
    after_group = false
    if sign == "\\" then
      if not pattern:find("^[^%dN]", at + 1) then
        return nil
      end
      at = at + 2
    elseif sign == "[" then
      local close = class_end(pattern, at)
      if not close then
        return nil
      end
      at = close + 1
    elseif repeated then
      if group then
        return nil
      end
      number = number + 1
      at = pattern:match("^[?+]()", repeated) or repeated -- a?? and a*+ are one repetition each
    else
      if pattern:find("^%(%?", at) or (sign == "|" and depth > 0) then
        return nil
      end
      depth = depth + (sign == "(" and 1 or 0) - (sign == ")" and 1 or 0)
      after_group = sign == ")"
      at = at + 1
    end
  end
  return number
end

-- A pattern in a JSON string. Python's matcher can take forever, and the engine does nothing else meanwhile.
local function check_pattern(self, key, word)
  local hidden = false
  local pattern = word:gsub("\\(.)(%x?%x?%x?%x?)", function(sign, digits)
    hidden = hidden or (sign == "u" and digits:find("^00[0-7]") ~= nil)
    return (sign == "\\" and "\\" or "x") .. digits
  end)
  if hidden then
    return unreadable(self, "%s has characters that are written as escapes. Write them plainly.", key)
  end
  local number = repetitions(pattern)
  if not number then
    return refuse(
      self, "would_end_the_engine", "%s may take forever: write it without (?, references, repeated groups and alternatives in groups.", key
    )
  end
  if number > SETTINGS.stopRegexRepetitions then
    return above(self, "The number of repetitions in " .. key, number, "stopRegexRepetitions")
  end
end

-- Patterns that SGLang matches after each token.
local function stop_patterns(self, text, value, key)
  local word = text:sub(value, value + PATTERNS_WINDOW)
  local plain = word:gsub('\\["\\]', "  ") -- as long as the word, without the quotes inside of strings
  local listed = plain:byte() == 91 -- [
  local at = plain:match(listed and "^%[[%s,]*()" or "^()")
  while at <= #plain do
    local close = plain:match('^"[^"]*()"', at)
    if plain:byte(at) ~= 34 then -- "
      if plain:find(listed and "^%]" or "^n", at) then
        return value
      end
      return nil, unreadable(self, WRONG_TYPE.texts, key)
    end
    if not close then
      break
    end
    local sentence = check_pattern(self, key, word:sub(at + 1, close - 1))
    if sentence then
      return nil, sentence
    end
    if not listed then
      return value
    end
    at = plain:match("^[%s,]*()", close + 1)
  end
  if #word > PATTERNS_WINDOW then
    return nil, unreadable(self, "%s is longer than %d bytes.", key, PATTERNS_WINDOW)
  end
  return nil
end

-- Token ids. Options: `empty` if the list may be empty, `texts` if it may hold texts, `prompts` if its rows are prompts, `most` for the
-- limit of a row, `known` if SGLang itself compares them with the vocabulary, `text` if the value may be a text.
local function tokens(options)
  return function(self, text, value, key)
    if text:byte(value) ~= 91 then
      if text:find((options.text or options.texts) and '^["n]' or "^n", value) then
        return value
      end
      return nil, unreadable(self, WRONG_TYPE.tokens, key)
    end
    if options.texts then
      local first = text:match('^%[%s*([^%s])', value)
      if not first then
        return nil
      end
      if first == '"' or first == "{" then
        return value
      end
    end
    self.list = { key = key, tokens = options, nest = 0 }
    return value
  end
end

local function texts(self, text, value, key)
  if text:byte(value) == 91 then
    local after = text:match("^%[%s*%[?%s*()", value)
    if after > #text then
      return nil
    end
    if text:byte(after) == 93 then -- ]
      return nil, is_empty(self, key)
    end
    self.batch = true
  end
  return value
end

local function embeddings(self, text, value, key)
  if text:byte(value) == 91 then
    self.list = { key = key, embeddings = true, nest = 0 }
  end
  return value
end

-- Bytes of a value, from its start to the next key.
local function sized(subject, limit)
  return function(self, _, value, key)
    if not self.sized then
      self.sized = { subject = subject, key = key, limit = limit, depth = self.depth, start = self.base + value }
    end
    return value
  end
end

local function not_offered(code, sentence)
  return function(self, text, value, key)
    if text:byte(value) ~= 110 then -- null
      return nil, refuse(self, code, sentence, key)
    end
    return value
  end
end

local function quoted(name)
  return (name:gsub("[^%w_.~-]", function(c) return ("%%%02X"):format(c:byte()) end))
end

-- A name with a backslash is written in a way of JSON's that is left to SGLang.
local function adapter(self, text, value)
  local word = text:sub(value, value + ADAPTERS_WINDOW)
  local names = word:match("^%b[]") or word:match('^"[^"]*"')
  if not names and word:find('^["[]') and #text - value < ADAPTERS_WINDOW then
    return nil
  end
  for name in (self.adapters and names or ""):gmatch('"([^"]+)"') do
    if not name:find("\\", 1, true) and not self.adapters:find("," .. quoted(name) .. ",", 1, true) then
      local shown = name:gsub("[^%w_./:@ -]", "?"):sub(1, 100)
      return nil, refuse(self, "adapter_not_loaded", "LoRA adapter %s is not loaded; GET /fleet lists those that are.", shown)
    end
  end
  return value
end

local NEVER = not_offered("would_end_the_engine", "%s is not offered here: it ends the engine's process.")
local PROCESSOR = not SETTINGS.customLogitProcessors and not_offered(
  "not_accepted",
  "%s is refused: these engines run no code from requests. engine.args with --enable-custom-logit-processor, which engine.acceptFlags has"
    .. " to list, allows it."
) or nil
local INTERNAL = not_offered("not_accepted", "%s is refused: SGLang sets it itself.")
local GRAMMAR = sized("The grammar up to ", "grammarBytes")
local MEDIA = sized("The media up to ", "mediaBytes")
local IDS = tokens({ prompts = true })
local IDS_OR_TEXTS = tokens({ texts = true, prompts = true })

local SHARED = {
  input_ids = IDS, stop_token_ids = tokens({ empty = true, stop = true }),
  top_k = number(top_k), n = number(samples), best_of = number(samples), beam_width = number(samples),
  json_schema = GRAMMAR, regex = GRAMMAR, ebnf = GRAMMAR, structural_tag = GRAMMAR, choice = GRAMMAR, response_format = GRAMMAR,
  stop_regex = stop_patterns, sampling_params = sampling_params,
  custom_logit_processor = PROCESSOR, lora_path = adapter, positional_embed_overrides = NEVER,
  -- /v1/score sets these inside SGLang, which does not check them against the length of the prompt.
  token_indices_to_pool = NEVER, multi_item_delimiter_indices = NEVER,
}
for _, key in ipairs({
  "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "max_new_tokens", "stream_interval",
  "sampling_seed",
}) do
  SHARED[key] = sampling_number
end
for _, key in ipairs({
  "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant",
  "lora_id", "http_worker_ipc", "need_wait_for_mm_inputs", "num_items_assigned", "encoder_urls",
}) do
  SHARED[key] = INTERNAL
end

local function with(more)
  for key, field in pairs(SHARED) do
    more[key] = field
  end
  return more
end

-- Fields of each path, at the top and in sampling_params.
local FIELDS = {
  ["/generate"] = with({
    text = texts, input_embeds = embeddings, min_new_tokens = number(least_tokens), logprob_start_len = number(logprob_start),
    top_logprobs_num = number(number_of_logprobs), token_ids_logprob = tokens({ empty = true, known = true, most = "logprobsPerToken" }),
    return_hidden_states = for_each_prompt,
    -- Labels that SGLang's metrics were not made with end an engine that exports them (engine.metrics).
    custom_labels = NEVER,
  }),
  ["/v1/completions"] = with({ prompt = IDS_OR_TEXTS, min_tokens = number(least_tokens), logprobs = number(number_of_logprobs) }),
  ["/v1/chat/completions"] = with({
    min_tokens = number(least_tokens), top_logprobs = number(number_of_logprobs), tools = GRAMMAR, -- if tool_choice demands a call
  }),
}
for _, path in ipairs({ "/classify", "/encode" }) do
  FIELDS[path] = with({ text = texts, min_new_tokens = number(least_tokens), embed_overrides = NEVER })
end
for _, path in ipairs({ "/v1/classify", "/v1/embeddings" }) do
  FIELDS[path] = with({ input = IDS_OR_TEXTS, embed_overrides = NEVER })
end
FIELDS["/v1/score"] = with({
  query = tokens({ empty = true, text = true }), items = IDS_OR_TEXTS, label_token_ids = tokens({ empty = true, most = "logprobsPerToken" }),
  query_embed_overrides = NEVER, item_embed_overrides = NEVER,
})
FIELDS["/v1/rerank"] = with({})
for _, path in ipairs({ "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize" }) do
  FIELDS[path] = {}
end

-- Keys of strings that are no image, audio or video themselves.
local NO_MEDIA = { type = true, format = true, detail = true, content_hash = true }

-- Linux opens no path with more characters.
local LONGEST_PATH = 4096

-- Characters of a string that tell a path from base64. Each of them may be written as \/.
local PLACE_WINDOW = 2 * LONGEST_PATH

-- How files begin in base64: PNG, JPEG, GIF, RIFF (WebP, WAV, AVI), MP4 (also HEIC and AVIF), WebM, Ogg, FLAC, MP3.
local MEDIA_STARTS = { "^iVBORw0KGgo", "^/9j/", "^R0lGOD", "^UklGR", "^AAAA", "^GkXfo", "^T2dnU", "^ZkxhQ", "^SUQz" }

local function is_path(word)
  if word:find("[:.\\]") then
    return true
  end
  for _, start in ipairs(MEDIA_STARTS) do
    if word:find(start) then
      return false
    end
  end
  return word:find("^/") or #word < LONGEST_PATH
end

-- An image, audio or video. SGLang opens paths in the engine's container, and fetches URLs, where a server without a gate may listen.
local function check_place(self, key, word)
  word = word:gsub("\\/", "/")
  if NO_MEDIA[key] or word == "" or word:find("^data:") then
    return nil
  end
  if not word:find("^https?://") then
    if is_path(word) then
      return refuse(self, "not_accepted", "%s names a file: send its content, as a data: URL or in base64.", key)
    end
    return nil
  end
  if SETTINGS.mediaUrls ~= "Allowed" then
    return refuse(
      self, "not_accepted", "%s is a URL, which the engine would fetch: send its content as a data: URL, or set engine.limits.mediaUrls.", key
    )
  end
end

-- Keys of images, audio and video, at any depth.
local MEDIA_KEYS = {
  image_data = MEDIA, video_data = MEDIA, audio_data = MEDIA, image_url = MEDIA, video_url = MEDIA, audio_url = MEDIA,
  input_audio = MEDIA, image = MEDIA, video = MEDIA, audio = MEDIA,
}
local PROMPTS = { text = true, prompt = true, input = true, items = true, documents = true }
local NEVER_EMPTY = { text = true, prompt = true, input = true, items = true }
local TEXTS_OR_TOKENS = { prompt = true, input = true, items = true }
