-- Refuse requests that would end the engine's process, or that name an adapter that is not loaded. The filter makes such a body
-- unreadable on its way to the engine, and the gate answers with a sentence.
--
-- SGLang does not check token ids outside the vocabulary, empty prompts and some numbers out of range. They end its scheduler, with all
-- running requests. For an unloaded adapter SGLang continues to give answers. The filter reads bodies as they pass, piece by piece,
-- without keeping them. It looks for keys only: a quote inside a JSON string follows a backslash, so what looks like a key is a key, at
-- any depth.

-- Sampling is done in 32 bits.
local LARGEST_K = 2147483647

-- Length of a list of adapters that is read.
local ADAPTERS_WINDOW = 4096

local Guard = { id = "guard", flags = filter.FLT_CFG_FL_HTX }
Guard.__index = Guard

-- Checks of a key's value. Each returns a sentence if the value must not pass; `word` is the start of the value.

local function empty_list(_, key, word)
  if word:find("^%[%s*%[?%s*%]") then
    return key .. " is empty: give at least one token."
  end
end

local function number_of_logprobs(self, key, word)
  local number = tonumber(word:match("^%d+"))
  if number and self.vocabulary and number > self.vocabulary then
    return string.format("%s is larger than the vocabulary of %d tokens.", key, self.vocabulary)
  end
end

local function top_k(_, key, word)
  local number = tonumber(word:match("^%d+"))
  if number and number > LARGEST_K then
    return string.format("%s is larger than %d; use -1 for the whole vocabulary.", key, LARGEST_K)
  end
end

local function logprob_start(_, key, word)
  local number = tonumber(word:match("^%-%d+"))
  if number and number < -1 then
    return key .. " is below -1, which means the prompt's end."
  end
end

local function not_offered(_, key, word)
  if not word:find("^null") then
    return key .. " is not offered here: it ends the engine's process."
  end
end

-- Stop tokens outside the vocabulary are harmless, and used, until SGLang has to suppress them.
local function least_tokens(self, _, word)
  self.suppresses = self.suppresses or word:find("^0*[1-9]") ~= nil
  return self.suppresses and self.stop_sentence or nil
end

local function quoted(name)
  return (name:gsub("[^%w_.~-]", function(c) return ("%%%02X"):format(c:byte()) end))
end

-- A name with a backslash is written in a way of JSON's that is left to SGLang.
local function adapter(self, _, word)
  if not self.adapters then
    return nil
  end
  for name in (word:match("^%b[]") or word:match('^"[^"]*"') or ""):gmatch('"([^"]+)"') do
    if not name:find("\\", 1, true) and not self.adapters:find("," .. quoted(name) .. ",", 1, true) then
      self.code = "adapter_not_loaded"
      return string.format("LoRA adapter %s is not loaded; GET /fleet lists those that are.", name:gsub("[^%w_./:@ -]", "?"):sub(1, 100))
    end
  end
end

local function nothing() end

local SHARED = {
  input_ids = empty_list,
  stop_token_ids = nothing,
  top_k = top_k,
  lora_path = adapter,
  positional_embed_overrides = not_offered,
}

local function with(more)
  for key, check in pairs(SHARED) do
    more[key] = check
  end
  return more
end

local KEYS = {
  ["/generate"] = with({
    text = empty_list, min_new_tokens = least_tokens, top_logprobs_num = number_of_logprobs, logprob_start_len = logprob_start,
    -- Labels that SGLang's metrics were not made with end an engine that exports them (engine.metrics).
    custom_labels = not_offered,
  }),
  ["/v1/completions"] = with({ prompt = empty_list, min_tokens = least_tokens, logprobs = number_of_logprobs }),
  ["/v1/chat/completions"] = with({ min_tokens = least_tokens, top_logprobs = number_of_logprobs }),
}
for _, path in ipairs({ "/classify", "/encode" }) do
  KEYS[path] = with({ text = empty_list, min_new_tokens = least_tokens, embed_overrides = not_offered })
end
for _, path in ipairs({ "/v1/classify", "/v1/embeddings" }) do
  KEYS[path] = with({ input = empty_list, embed_overrides = not_offered })
end
KEYS["/v1/score"] = with({
  query = nothing, items = empty_list, label_token_ids = nothing,
  query_embed_overrides = not_offered, item_embed_overrides = not_offered,
})
KEYS["/v1/rerank"] = with({})
local TOKENS = {
  input_ids = true, prompt = true, stop_token_ids = true, input = true, query = true, items = true, label_token_ids = true,
}
local MAY_BE_EMPTY = { stop_token_ids = true, query = true, label_token_ids = true }
local TEXTS = { text = true, prompt = true, input = true, items = true }

function Guard:new()
  return setmetatable({ rest = "", code = "would_end_the_engine" }, Guard)
end

function Guard:start_analyze(_, channel)
  if not channel:is_resp() then
    filter.register_data_filter(self, channel)
  end
end

function Guard:http_headers(txn, message)
  if not message:is_resp() then
    self.keys = KEYS[txn.sf:path()]
    self.vocabulary = tonumber(txn:get_var("txn.vocabulary"))
    local adapters = txn:get_var("txn.adapters")
    self.adapters = adapters ~= "?" and adapters or nil
    self.digits = self.vocabulary and ("%d"):rep(#tostring(self.vocabulary)) .. "%d*"
  end
end

function Guard:http_payload(txn, message)
  local piece = message:body()
  if not self.keys or not piece or #piece == 0 then
    return
  end
  if not self.refused then
    self.refused = self:read(self.rest .. piece)
    if self.refused then
      txn:set_var("txn.refused", self.refused)
      txn:set_var("txn.code", self.code)
    end
  end
  if self.refused then
    message:set(("!"):rep(#piece))
  end
end

local function has_empty(span)
  return span:find("[]", 1, true) or (span:find("[ ", 1, true) and span:find("%[%s+%]"))
end

-- Return true if the part of a value that has arrived does not decide yet.
local function goes_on(word, check)
  if check == adapter and word:find('^["[]') then
    return not (word:find("^%b[]") or word:find('^"[^"]*"'))
  end
  return word:find("^[%[%s%w.+-]*$") ~= nil
end

-- One piece, with what was left of the one before. Returns the sentence of a refusal.
function Guard:read(text)
  local at, sentence = 1, nil
  self.rest = text:sub(-1)
  while true do
    if self.list then
      at, sentence = self:read_list(text, at)
      if sentence or not at then
        return sentence
      end
    end
    local quote = text:find('"', at, true)
    if not quote then
      return nil
    end
    at = quote + 1
    local key, value = text:match('^"([%w_]*)"%s*:%s*()', quote)
    if key then
      self.last = key
      local check = self.keys[key]
      if check then
        local width = check == adapter and ADAPTERS_WINDOW or 40
        local word = text:sub(value, value + width)
        if goes_on(word, check) and #text - value < width then
          self.rest = text:sub(quote)  -- it continues in the next piece
          return nil
        end
        sentence = check(self, key, word)
        if sentence then
          return sentence
        end
        self.list = TOKENS[key] and text:find("^%[", value) and key
        at = value
      end
    elseif TEXTS[self.last] and self.keys[self.last] and text:find('^""', quote) and text:sub(quote - 1, quote - 1) ~= "\\" then
      return self.last .. " is empty: give at least one token."
    elseif #text - quote < 64 and text:find('^"[%w_]*"?%s*:?%s*$', quote) then
      self.rest = text:sub(math.max(1, quote - 1))
      return nil
    end
  end
end

-- Inside a list of token ids: returns where it ends (nil: in a later piece), and the sentence. Plain searches are ten times as fast as
-- patterns, and prompts are long: the list ends at the latest where a string or the object's end begins.
function Guard:read_list(text, at)
  local quote, brace = text:find('"', at, true), text:find("}", at, true)
  local after = math.min(quote or #text + 1, brace or #text + 1)
  local span = text:sub(at, after - 1)
  if after > #text then
    local open = span:sub(-32):match("[%d%[%s-]*$")  -- a number, or an empty list, that may continue
    self.rest = open
    span = span:sub(1, #span - #open)
  end
  local found = not MAY_BE_EMPTY[self.list] and has_empty(span) and self.list .. " is empty: give at least one token."
  local wrong = span:find("-", 1, true) and span:match("%-%d+") or self:outside(span)
  if wrong and not found then
    found = string.format("%s holds token %s", self.list, wrong:sub(1, 20))
    found = found .. (self.vocabulary and string.format("; this model's tokens are 0 to %d.", self.vocabulary - 1) or ", which no model has.")
  end
  if found and self.list == "stop_token_ids" then
    self.stop_sentence = found:sub(1, -2) .. ", and SGLang dies of suppressing it until the least number of tokens is there."
    found = self.suppresses and self.stop_sentence
  end
  if after > #text then
    return nil, found or nil
  end
  self.list = nil
  return after, found or nil
end

-- The first number that is no token.
function Guard:outside(span)
  if not self.digits then
    return nil
  end
  for number in span:gmatch(self.digits) do
    if tonumber(number) >= self.vocabulary then
      return number
    end
  end
end

core.register_filter("guard", Guard, function(guard, _) return guard end)
