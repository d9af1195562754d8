-- Lists of strings, and of numbers: tokens, embeddings and values for each prompt. This file follows guard.lua, whose filter it completes.

local function least(one, other)
  return one and other and math.min(one, other) or one or other
end

-- A list of strings, up to its end. The strings are skipped one by one.
function Guard:read_texts(text, at)
  while true do
    local place = text:find("[^%s,]", at)
    if not place then
      return nil
    end
    local byte = text:byte(place)
    if byte == 34 then -- "
      local sentence = self:count_values(1)
      self.inside = 0
      return not sentence and place + 1 or nil, sentence
    end
    if byte == 93 then -- ]
      self.texts = nil
      return place + 1
    end
    if byte ~= 91 or self.texts.open then
      return nil, unreadable(self, WRONG_TYPE.texts, self.texts.key)
    end
    self.texts.open = true
    at = place + 1
  end
end

-- A list of numbers, up to its end. Returns where it ends (nil: in a later piece), and the sentence. Plain searches are ten times as fast
-- as patterns, and prompts are long. So the numbers of all rows are read at once, and only the brackets row by row.
function Guard:read_list(text, at)
  local list = self.list
  local quote = text:find('"', at, true) -- of the next key, or of a string in the list
  local span = text:sub(at, (quote or #text + 1) - 1)
  local stop, sentence = self:read_brackets(list, span)
  local last = stop or #span
  if not stop and not quote then
    self.rest = span:sub(-LONGEST_NUMBER):match("[^,%s%[%]]*$") -- a number that may continue
    last = last - #self.rest
  end
  sentence = self:read_numbers(list, span:sub(1, last)) or sentence
  if not sentence and not stop and quote then
    sentence = unreadable(self, "%s holds a string: write token ids as numbers.", list.key)
  end
  if sentence or not stop then
    return nil, sentence
  end
  self.list = nil
  return at + stop
end

-- The brackets of a list. Returns the place of the bracket that ends the list, or that is refused, and the sentence.
function Guard:read_brackets(list, span)
  local place, opened, closed = 0, 0, 0
  while true do
    opened = opened and (opened > place and opened or span:find("[", place + 1, true))
    closed = closed and (closed > place and closed or span:find("]", place + 1, true))
    local bracket = least(opened, closed)
    if not list.filled then
      local first = span:find("[^%s]", place + 1)
      list.filled = first ~= nil and first ~= bracket
    end
    local sentence = self:check_level(list, span, place + 1, bracket) or self:count_numbers(list, span, place + 1, bracket)
    if bracket and not sentence then
      sentence = self:read_bracket(list, bracket == opened)
    end
    if sentence or not bracket or list.nest == 0 then
      return bracket, sentence
    end
    place = bracket
  end
end

function Guard:read_bracket(list, opens)
  if opens then
    list.nest, list.filled, list.number = list.nest + 1, false, 0
    if list.nest == 2 then
      list.rows = (list.rows or 0) + 1
    end
    self.batch = self.batch or list.nest == ((list.tokens and list.tokens.prompts) and 2 or 3)
    -- Embeddings of several prompts are one level deeper than embeddings of one.
    list.deep = list.deep or list.nest == 3 or (list.tokens and list.tokens.prompts)
    if list.deep and list.rows and (self.counts[list.key] or 0) < list.rows then
      self.counts[list.key] = list.rows - 1
      return count_prompt(self, list.key)
    end
    return nil
  end
  local empty = not list.filled and list.tokens and not list.tokens.empty
  list.nest, list.filled, list.number = list.nest - 1, true, nil
  return empty and is_empty(self, list.key) or nil
end

-- Numbers have to be in lists of the same level. SGLang's HTTP server would write a message about each number.
function Guard:check_level(list, span, from, bracket)
  local digit = span:find("%d", from)
  if not digit or (bracket and digit > bracket) then
    return nil
  end
  list.level = list.level or list.nest
  if list.nest ~= list.level or (list.embeddings and (list.nest == 1 or list.nest > 3)) then
    return unreadable(self, "%s holds numbers at a wrong level.", list.key)
  end
end

-- Count the numbers of a row of a list with a limit, up to a bracket; nil if this is in a later piece.
function Guard:count_numbers(list, span, from, bracket)
  local limit = list.number and list.tokens and list.tokens.most
  if not limit then
    return nil
  end
  list.number = list.number + select(2, span:sub(from, (bracket or #span + 1) - 1):gsub(",", ""))
  if list.number >= SETTINGS[limit] then
    return more_than(self, list.key, "tokens", limit)
  end
end

-- Characters of objects, true, false, null, NaN and Infinity.
local WORD_MARKS = { "n", "t", "f", "N", "I", "{" }

function Guard:read_numbers(list, span)
  if list.check then
    for word in span:gmatch("[^,%s%[%]]+") do
      local sentence = self:count_values(1) or check_number(self, list.key, word, list.check)
      if sentence then
        return sentence
      end
    end
    return nil
  end
  if list.embeddings then
    for _, mark in ipairs(WORD_MARKS) do
      if span:find(mark, 1, true) then
        return unreadable(self, "%s holds a word or an object: write numbers.", list.key)
      end
    end
  end
  return list.tokens and self:read_tokens(list, span) or nil
end

-- Characters of words that are no token ids.
local MARKS = { "-", ".", "e", "E", "n", "N", "{" }

function Guard:read_tokens(list, span)
  -- Numbers with fractions, exponents and signs, the words true, false, null, NaN and Infinity, and objects.
  local odd
  if #span < SHORT_SPAN then
    odd = span:find("[^%d,%s%[%]]")
  else
    for _, mark in ipairs(MARKS) do
      odd = least(odd, span:find(mark, 1, true))
    end
  end
  local word = odd and span:sub(math.max(1, odd - LONGEST_NUMBER), odd - 1):match("[^,%s%[%]]*$") .. span:match("^[^,%s%[%]]*", odd)
  if word and not word:find("^%-%d+$") then
    return unreadable(self, "%s holds %s: write token ids as whole numbers.", list.key, written(word))
  end
  word = not list.tokens.known and (word or self:outside(span))
  if not word then
    return nil
  end
  local sentence = ("%s holds token %s"):format(list.key, word:sub(1, 20))
  sentence = sentence .. (self.vocabulary and ("; this model's tokens are 0 to %d."):format(self.vocabulary - 1) or ", which no model has.")
  if not list.tokens.stop then
    return refuse(self, "would_end_the_engine", "%s", sentence)
  end
  self.stop_sentence = sentence:sub(1, -2) .. ", and SGLang ends when it suppresses this token for min_new_tokens."
  if self.suppresses then
    return refuse(self, "would_end_the_engine", "%s", self.stop_sentence)
  end
end

-- The first number that is no token.
function Guard:outside(span)
  if not self.digits then
    return nil
  end
  for digits in span:gmatch(self.digits) do
    if tonumber(digits) >= self.vocabulary then
      return digits
    end
  end
end

core.register_filter("guard", Guard, function(guard, _) return guard end)
